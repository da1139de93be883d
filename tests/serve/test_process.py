@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_taken_before_it_listens(host):
    try:
        listener = bind(host, 0)
    except ValueError:
        pytest.skip("needs IPv6")
    with listener, socket.socket(listener.family) as other:
        address = listener.getsockname()
        assert other.connect_ex(address) != 0, "nobody listens"
        refused(lambda: bind(host, address[1]), f"--port {address[1]}", "in use", "expected")
        listener.listen()
        assert other.connect_ex(address) == 0


@contextmanager
def command(*options: str, port: int = 0):
    """The server as a process; yields it and its URL."""
    words = f"serve --verifier tiny --dtype float32 --nodes 4 --context 512 --port {port}".split()
    process = subprocess.Popen([sys.executable, "-m", "treeflash_jax", *words, *options], stderr=subprocess.PIPE, text=True)
    try:
        yield process, re.search(r"serving tiny at (\S+)", next(line for line in process.stderr if "serving" in line))[1]
    finally:
        process.kill()


@pytest.mark.slow
def test_the_command_ends_with_its_last_answer():
    with command("--slots", "1", "--grace", "60") as (process, url):
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 200, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=600) as response:
            events = response.iter_lines()
            assert json.loads(next(events).removeprefix("data: "))["object"] == "chat.completion.chunk"
            process.send_signal(signal.SIGTERM)
            *_, last = [line for line in events if line]
        assert last == "data: [DONE]" and process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/models")


@pytest.mark.slow
def test_many_clients_lose_nothing_and_memory_stays_flat():
    """64 clients for a minute; then the process is killed, and another one takes its port."""

    def resident() -> int:
        return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def ask(number: int) -> int:
        """Returns the number of answers that one client got."""
        rng, client, count = (
            random.Random(number),
            openai.OpenAI(base_url=url, api_key="any", timeout=600, max_retries=0),
            0,
        )
        while time.monotonic() < end:
            chat = [{"role": "user", "content": "cat " * rng.randint(1, 80)}]
            given = {"model": "tiny", "messages": chat, "max_tokens": rng.randint(1, 24), "seed": rng.randint(0, 9)}
            if rng.random() < 0.5:
                *_, last = client.chat.completions.create(**given, stream=True)
                assert last.choices[0].finish_reason in ("stop", "length")
            else:
                answer = client.chat.completions.create(**given)
                assert 0 < answer.usage.completion_tokens <= given["max_tokens"]
            count += 1
        return count

    with command("--slots", "8") as (process, url):
        end = time.monotonic() + 60
        with ThreadPoolExecutor(64) as pool:
            counts = [pool.submit(ask, number) for number in range(64)]
            time.sleep(20)
            early = resident()
            total = sum(count.result() for count in counts)
        assert total > 64 and resident() < 1.1 * early
        text = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
        assert "treeflash_running 0.0\n" in text and "treeflash_waiting 0.0\n" in text
        assert sum(map(float, re.findall(r"answers_total{.*} (\S+)", text))) == total
        process.kill()
        process.wait()
        with command("--slots", "8", port=httpx.URL(url).port) as (_, again):
            assert again == url and httpx.get(f"{url}/models").json()["data"][0]["id"] == "tiny"
