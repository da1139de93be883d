"""The chat page in headless Chromium, with its real server: run where selenium, Chromium and its driver are installed."""

import json
import re
import shutil
from urllib.parse import urlsplit

import httpx
import pytest
from servers import CONTEXT, wait_for

webdriver = pytest.importorskip("selenium.webdriver")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(DRIVER is None, reason="needs Chromium and its driver")
QUESTION = "Sam has 2 cats and 3 dogs."
BUSY = "[aria-busy=true]"


@pytest.fixture(scope="module")
def chromium():
    options = webdriver.ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


class Page:
    """The page of a server in a browser, by what a user sees and does."""

    def __init__(self, browser, url: str):
        self.browser, self.url = browser, url

    def find(self, selector: str) -> list:
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [element.get_property("textContent") for element in self.find(selector)]

    def run(self, script: str, *given):
        return self.browser.execute_script(script, *given)

    def press(self, selector: str, text: str = "") -> None:
        """Clicks the last element with this selector whose text begins so."""
        [*_, last] = [element for element in self.find(selector) if element.text.startswith(text)]
        last.click()

    def set(self, **settings) -> None:
        self.press("summary", "Settings")
        for name, value in settings.items():
            self.browser.find_element("id", name).clear()
            self.browser.find_element("id", name).send_keys(str(value))
        self.press("summary", "Settings")

    def send(self, text: str) -> None:
        self.browser.find_element("id", "text").send_keys(text + "\n")

    def wait_until_streaming(self) -> None:
        wait_for(lambda: self.run("return chat.at(-1).content.length > 3"))
        assert self.find(BUSY), "the answer is longer than the test takes to look"

    def wait_until_done(self) -> None:
        wait_for(lambda: self.find(".assistant") and not self.find(BUSY))

    def messages(self) -> list[dict]:
        return self.run("return chat")

    def expected(self, messages: list[dict], **given) -> str:
        """Returns the answer of the server to a plain request."""
        body = {"messages": [{"role": message["role"], "content": message["content"]} for message in messages]} | given
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=600).json()
        return response["choices"][0]["message"]["content"]


@pytest.fixture
def page(chromium, server):
    """A fresh page, which asks for greedy answers; afterwards, nothing went wrong and nothing was sent elsewhere."""
    chromium.get(server.url)
    chromium.execute_script("startChat([]); for (const id of [...SETTINGS, 'key']) get(id).value = ''")  # the page saves it
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    chromium.get(server.url)
    page = Page(chromium, server.url)
    page.set(temperature=0)
    yield page
    page.run("startChat([])")
    errors = [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in errors if "status of 4" not in entry["message"]], "errors of the page itself"
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    sent = {
        event["params"]["requestId"]: event["params"] for event in events if event["method"] == "Network.requestWillBeSent"
    }
    for event in events:
        if event["params"].get("blockedReason") == "csp":  # by the page's policy, before it was sent
            del sent[event["params"]["requestId"]]
    urls = [urlsplit(params["request"]["url"]) for params in sent.values()]
    assert urls and {url.netloc for url in urls if url.scheme != "data"} == {urlsplit(server.url).netloc}


def never_ends(tiny) -> str:
    """Returns a script that lets every request run to the end of the context, since the tiny model's answers are short."""
    bias = {str(token): -100 for token in tiny.stop_ids}
    return f"const plain = makeBody; makeBody = (messages) => ({{ ...plain(messages), logit_bias: {json.dumps(bias)} }})"


def test_an_answer_is_that_of_the_api_with_the_settings_of_the_page(page):
    page.set(max_tokens=30, system="Sam counts cats.")
    page.send(QUESTION)
    page.wait_until_done()
    chat = [{"role": "system", "content": "Sam counts cats."}, {"role": "user", "content": QUESTION}]
    given = {"temperature": 0, "max_tokens": 30}
    answer = page.messages()[1]["content"]
    assert answer and answer == page.expected(chat, **given)
    assert page.browser.title == "tiny" and QUESTION in page.texts(".user")[0]
    assert re.fullmatch(r"\d+ tokens in [\d.]+ s · tau [1-9]\.\d\d", page.texts(".assistant .note")[0])
    page.send("And birds?")
    wait_for(lambda: len(page.messages()) == 4)
    page.wait_until_done()
    chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And birds?"}]
    assert page.messages()[3]["content"] == page.expected(chat, **given)


def test_stop_keeps_what_has_come(page, tiny):
    page.run(never_ends(tiny))
    for stop in (lambda: page.press("#stop"), lambda: page.browser.find_element("id", "text").send_keys("\ue00c")):
        page.press("#new")
        page.send(QUESTION)
        page.wait_until_streaming()
        stop()
        page.wait_until_done()
        [_, answer] = page.messages()
        assert answer["note"] == "stopped" and 3 < len(answer["content"]) and answer["tokens"] is None
        assert page.find(".strip button"), "its rounds so far"
    page.send("And birds?")
    page.wait_until_streaming()
    assert len(page.messages()) == 4, "the chat goes on"


def test_a_new_chat_while_an_answer_streams_stays_empty(page, server, tiny):
    page.run(never_ends(tiny))
    page.send(QUESTION)
    page.wait_until_streaming()
    page.press("#new")
    assert page.find("#send")[0].is_displayed() and not page.find("#stop")[0].is_displayed()
    wait_for(lambda: "treeflash_running 0.0" in httpx.get(f"{server.url}/metrics").text)
    assert page.messages() == [] and page.texts("#chat") == [""]
    assert page.run("return localStorage['treeflash.chat']") == "[]"
    page.send("And birds?")
    page.wait_until_streaming()
    assert [message["role"] for message in page.messages()] == ["user", "assistant"] and len(page.find("article")) == 2


def test_retry_and_edit_cut_the_chat_there(page):
    page.set(max_tokens=12)
    for count, text in ((2, QUESTION), (4, "And birds?")):
        page.send(text)
        wait_for(lambda count=count: len(page.messages()) == count)
        page.wait_until_done()
    first, answer, _, _ = page.messages()
    page.set(max_tokens=5)
    page.find(".assistant .actions button:nth-child(2)")[0].click()  # Retry of the first answer
    wait_for(lambda: len(page.messages()) == 2)
    page.wait_until_done()
    assert page.messages()[0] == first and page.texts(".user .content") == [QUESTION]
    assert (
        answer["content"].startswith(page.messages()[1]["content"]) and answer["content"] != page.messages()[1]["content"]
    )
    page.press(".user button", "Edit")
    page.press("#cancel")
    assert len(page.messages()) == 2 and page.run("return get('text').value") == ""
    page.press(".user button", "Edit")
    page.send(" And 1 bird.")
    wait_for(lambda: page.texts(".user .content") == [f"{QUESTION} And 1 bird."])
    page.wait_until_done()
    [user, answer] = page.messages()
    assert answer["content"] == page.expected([user], temperature=0, max_tokens=5)


def test_every_round_shows_its_tree(page):
    page.set(max_tokens=40)
    page.send(QUESTION)
    page.wait_until_done()
    rounds = page.messages()[1]["rounds"]["rounds"]
    bars = page.find(".strip button")
    assert len(bars) == len(rounds) > 8
    best = max(range(len(rounds) - 1), key=lambda index: rounds[index]["length"])
    bars[best].click()
    wait_for(lambda: page.find(".tree"))
    assert len(page.find(".tree .accepted")) == rounds[best]["length"] and len(page.find(".tree .bonus")) == 1
    assert page.texts(".pieces .chosen") == [rounds[best]["accepted"] + rounds[best]["bonus"]]
    assert "".join(page.texts(".pieces")) == page.messages()[1]["content"]
    bars[best].send_keys("\ue014")  # arrow to the right
    wait_for(lambda: page.texts(".round strong")[0].startswith(f"Round {best + 1}:") and page.find(".tree"))
    bars[best + 1].click()
    assert not page.find(".round")[0].is_displayed(), "a second click closes it"


def test_a_reload_keeps_the_chat_and_the_settings(page):
    page.set(max_tokens=20, system="Sam counts cats.", key="none")
    page.send(QUESTION)
    page.wait_until_done()
    before, shown = page.messages(), page.texts("article")
    page.browser.refresh()
    assert page.messages() == before and page.texts("article") == shown
    values = [page.find(f"#{name}")[0].get_property("value") for name in ("max_tokens", "system", "key")]
    assert values == ["20", "Sam counts cats.", "none"]
    page.find(".strip button")[0].click()
    wait_for(lambda: page.find(".tree"))


def test_a_reload_while_an_answer_streams_keeps_what_has_come(page, tiny):
    page.run(never_ends(tiny))
    page.send(QUESTION)
    page.wait_until_streaming()
    page.browser.refresh()
    user, answer = page.messages()
    assert user["content"] == QUESTION and len(answer["content"]) > 3 and not page.find(BUSY)


def test_errors_are_the_servers_line_and_are_not_sent_again(page):
    page.set(temperature=-1)
    page.send("Wrong")
    page.wait_until_done()
    assert page.texts(".error") == ["got temperature -1.0, expected at least 0"]
    page.set(temperature=0, max_tokens=CONTEXT)
    page.send("Too long")
    wait_for(lambda: len(page.texts(".error")) == 2)
    assert f"expected at most {CONTEXT} together" in page.texts(".error")[1]
    page.set(max_tokens=8)
    page.send(QUESTION)
    wait_for(lambda: len(page.messages()) == 6)
    page.wait_until_done()
    assert page.messages()[5]["content"] == page.expected(page.messages()[4:5], temperature=0, max_tokens=8)
    page.press(".assistant button", "Retry")
    wait_for(lambda: len(page.messages()) == 6)
    page.wait_until_done()


def test_markdown_becomes_elements_and_html_stays_text(page):
    def render(text: str) -> str:
        return page.run("return make('div', {}, ...markdown(arguments[0])).innerHTML", text)

    assert render("# One\n### Two #\ntext") == "<h2>One</h2><h4>Two</h4><p>text</p>"
    assert render("**b *i* `c*`** a_b_c _d_ \\*e\\*") == (
        "<p><strong>b <em>i</em> <code>c*</code></strong> a_b_c <em>d</em> *e*</p>"
    )
    assert render("- a\n  - b\n- c\n\n3. d\n\n   e\n4. f") == (
        "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>"
        '<ol start="3"><li><p>d</p><p>e</p></li><li><p>f</p></li></ol>'
    )
    assert "<thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>|</td></tr></tbody>" in (
        render("| a | b |\n|---|:-:|\n| 1 | \\| |")
    )
    assert render("> a\n> - b") == "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote>"
    for text in ("```py\nx = '<b>'\n\n# no title\n```\nend", "```py\nx = '<b>'\n\n# no title"):  # the second still grows
        page.run("get('chat').replaceChildren(...markdown(arguments[0]))", text)
        assert page.texts("#chat pre") == ["x = '<b>'\n\n# no title"] and page.texts("#chat .code div")[0] == "pyCopy"
    links = (
        "[a](https://x.org/b_(c)) https://y.org/d. [e](javascript:alert(1)) [f](data:text/html,x) ![g](https://z.org/h.png)"
    )
    page.run("get('chat').replaceChildren(...markdown(arguments[0]))", links)
    assert [link.get_attribute("href") for link in page.find("#chat a")] == [
        "https://x.org/b_(c)", "https://y.org/d", "https://z.org/h.png"
    ]  # fmt: skip
    assert "[e](javascript:alert(1))" in page.texts("#chat")[0]


def test_nothing_in_an_answer_runs_or_loads(page, server):
    image = "<img src=//x.org/y onerror=hacked=1>"
    attack = f"{image} <script>hacked=1</script> `<svg onload=hacked=1>` **{image}** [{image}]({image})\n\n- {image}\n\n"
    attack += f"| {image} | b |\n|---|---|\n| c | {image} |\n\n```{image}\n{image}\n```"
    message = {"role": "assistant", "content": attack, "thought": attack, "error": attack, "id": "x"}
    message["calls"] = [{"name": attack, "arguments": attack}]
    rounds = [{"length": 1, "accepted": attack, "bonus": attack}]
    message["rounds"] = {"tau": 1, "drafts": True, "first": attack, "rounds": rounds}
    page.run("startChat([{ role: 'user', content: arguments[0].content }, arguments[0]])", message)
    page.run(
        "get('chat').append(drawTree({ nodes: [{ text: arguments[0], accepted: true }], bonus: arguments[0] }))", attack
    )
    assert not page.find("#chat img, #chat script, #chat svg") and page.run("return typeof hacked") == "undefined"
    page.run("get('chat').innerHTML = arguments[0]", attack)  # what the page never does: its policy stands behind it
    wait_for(lambda: "Content Security Policy" in str(page.browser.get_log("browser")))
    assert page.run("return typeof hacked") == "undefined"


def test_long_and_hostile_markdown_takes_no_time(page):
    texts = [
        "*a **b _c " * 2000,
        "`" * 20_000,
        "> " * 5000,
        "- " * 5000,
        "[" * 20_000,
        "**" * 10_000,
        "|a" * 9000 + "\n|-|-|",
    ]
    for text in texts:
        milliseconds = page.run("const t = performance.now(); markdown(arguments[0]); return performance.now() - t", text)
        assert milliseconds < 2000, text[:10]


def test_thoughts_are_folded_when_the_answer_begins_and_calls_are_code(page):
    """The tiny model has neither: chunks come from the test."""
    page.run("""
      const read = (controller) => {
        window.push = (text) => controller.enqueue(new TextEncoder().encode(text));
        window.end = () => controller.close();
      };
      const answer = () => new Response(new ReadableStream({ start: read }));
      window.fetch = async (path) => path.startsWith("/v1") ? answer() : new Response("{}", { status: 404 });
    """)
    page.send(QUESTION)

    def push(delta: dict) -> None:
        event = f"data: {json.dumps({'id': 'x', 'choices': [{'delta': delta}]})}\n\n"
        for half in (event[:9], event[9:]):  # chunks of HTTP are not events
            page.run("push(arguments[0])", half)

    wait_for(lambda: page.run("return typeof push") == "function")
    push({"reasoning_content": "Cats, then"})
    push({"reasoning_content": " dogs."})
    wait_for(lambda: page.texts(".thought div") == ["Cats, then dogs."])
    assert page.texts(".thought summary") == ["Thinking…"] and page.find(".thought")[0].get_property("open")
    push({"content": "Five."})
    wait_for(lambda: page.texts(".assistant .content") == ["Five."])
    assert page.texts(".thought summary") == ["Thought"] and not page.find(".thought")[0].get_property("open")
    push({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "count", "arguments": ""}}]})
    push({"tool_calls": [{"index": 0, "function": {"arguments": '{"of": "cats"}'}}]})
    page.run("end()")
    page.wait_until_done()
    assert page.texts(".assistant pre") == ['count({"of": "cats"})']
    assert page.run("return makeBody(chat).messages.at(-1)") == {"role": "assistant", "content": "Five."}
