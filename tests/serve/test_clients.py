"""What people run against a server, in the modes that are their defaults: pydantic-ai, LangChain, instructor.

instructor needs an older client of OpenAI, so its test runs where it is installed beside one: pip install instructor.
"""

import functools
import operator

import openai
import pytest
from pydantic import BaseModel, Field
from servers import running, with_tools

pytestmark = pytest.mark.slow
SETTINGS = {"temperature": 0.7, "max_tokens": 150, "seed": 3}


class City(BaseModel):
    """A city."""

    letter: str = Field(pattern="^[A-F]$")
    size: int = Field(ge=1, le=40)


@pytest.fixture(scope="module")
def url(tiny):
    with running(with_tools(tiny)) as server:
        yield f"{server.url}/v1"


def test_pydantic_ai(url):
    """Tool output is its default: it demands a call. Then a schema, and a run whose model may call a tool."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def find_size(letter: str) -> int:
        """Returns the size of a city."""
        return 7

    for kind in OpenAIChatModel, OpenAIResponsesModel:
        model = kind("tiny", provider=OpenAIProvider(base_url=url, api_key="any"))
        for output in City, pydantic_ai.NativeOutput(City), [City, bool]:
            agent = pydantic_ai.Agent(model, output_type=output, model_settings=SETTINGS, retries=0)
            result = agent.run_sync("Which city?")
            assert isinstance(result.output, City | bool) and result.usage.requests == 1
        agent = pydantic_ai.Agent(model, tools=[find_size], model_settings=SETTINGS | {"max_tokens": 40})
        assert isinstance(agent.run_sync("Which city?").output, str)


def test_langchain(url):
    langchain_openai = pytest.importorskip("langchain_openai")
    for speaks_responses in False, True:
        more = SETTINGS | {"use_responses_api": speaks_responses, "seed": None if speaks_responses else 3}
        model = langchain_openai.ChatOpenAI(model="tiny", base_url=url, api_key="any", **more)
        for method in {}, {"method": "json_schema"}, {"method": "function_calling"}:
            assert isinstance(model.with_structured_output(City, **method).invoke("Which city?"), City)
        [call] = model.bind_tools([City], tool_choice="any", parallel_tool_calls=False).invoke("Which city?").tool_calls
        assert call["name"] == "City" and City(**call["args"])
        streamed = functools.reduce(operator.add, model.bind_tools([City], tool_choice="City").stream("Which city?"))
        assert City(**streamed.tool_calls[0]["args"])


def test_instructor(url):
    instructor = pytest.importorskip("instructor")
    for mode in instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA:
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="any"), mode=mode)
        messages = [{"role": "user", "content": "Which city?"}]
        city = client.chat.completions.create(
            model="tiny", messages=messages, response_model=City, max_retries=0, **SETTINGS
        )
        assert isinstance(city, City)
