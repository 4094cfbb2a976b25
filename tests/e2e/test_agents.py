"""Tool loops of the openai client and of OpenAI's Agents SDK.

With a scripted engine the model decides: it calls tools, gets their results, and answers. With a server of its own and
random weights the first call is forced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest

from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import END, MODEL, scripted, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% if message.role == 'tool' %}{% endif %}"
    "{% for call in message.tool_calls %}({{ call.function.name }}){% endfor %}{% endfor %}"
    "{% if tools %}{# <tool_call> </think> #}{% endif %}"
)
CALLS = "<think>Both.</think>" + "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in ("Paris", "Rome")
)


class City(pydantic.BaseModel):
    city: str


def play(request: Any, choice: int) -> list[int]:
    """Two calls; behind their results, an answer made of them."""
    prompt = bytes(request.prompt_token_ids).decode()
    results = [part.partition("<")[0] for part in prompt.split("<tool>")[1:]]
    text = f"It is {' and '.join(results)}." if results else CALLS
    return [*text.encode(), END]


@asynccontextmanager
async def connected():
    async with scripted(play, template=TEMPLATE) as client:
        transport = httpx2.ASGITransport(app=client.app)
        async with httpx2.AsyncClient(transport=transport) as http:
            yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


@on_event_loop
async def test_a_loop_of_the_openai_client():
    tools = [openai.pydantic_function_tool(City, name="weather")]
    messages: list[Any] = [{"role": "user", "content": "Where is it warm?"}]
    async with connected() as client:
        answer = await client.chat.completions.parse(model=MODEL, messages=messages, tools=tools)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [call.function.parsed_arguments for call in message.tool_calls] == [
            City(city="Paris"),
            City(city="Rome"),
        ]
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call, result in zip(message.tool_calls, ("18", "25"), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        assert answer.choices[0].message.content == "It is 18 and 25."


@on_event_loop
async def test_the_clients_stream_helper_sees_calls_and_arguments():
    tools = [openai.pydantic_function_tool(City, name="weather")]
    async with (
        connected() as client,
        client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "x"}], tools=tools) as stream,
    ):
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert [(event.index, event.name, event.parsed_arguments) for event in done] == [
        (0, "weather", City(city="Paris")),
        (1, "weather", City(city="Rome")),
    ]
    message = final.choices[0].message
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Paris", "Rome"]


@pytest.mark.parametrize("streamed", [False, True])
@on_event_loop
@pytest.mark.one_in(2)
async def test_an_agent_runs_its_loop(streamed):
    asked: list[str] = []

    import agents  # takes seconds

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return {"Paris": "18", "Rome": "25"}[city]

    agents.set_tracing_disabled(True)
    async with connected() as client:
        model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        agent = agents.Agent(name="Forecaster", instructions="Help.", model=model, tools=[weather])
        if streamed:
            result = agents.Runner.run_streamed(agent, "Where is it warm?")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "Where is it warm?")
    assert sorted(asked) == ["Paris", "Rome"]
    assert result.final_output == "It is 18 and 25."


class Trip(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=14)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)) as running:
        yield running


def test_a_forced_call_of_the_openai_client(server: Server) -> None:
    ask = {"model": MODEL, "tools": [openai.pydantic_function_tool(Trip)], "parallel_tool_calls": False, "seed": 1}
    messages: list[Any] = [{"role": "user", "content": "A trip!"}]
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(messages=messages, tool_choice="required", max_tokens=150, **ask)
        message = answer.choices[0].message
        (call,) = message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Trip)
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "booked"})
        named = {"type": "function", "function": {"name": "Trip"}}
        with client.chat.completions.stream(messages=messages, tool_choice=named, max_tokens=150, **ask) as stream:
            final = stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Trip)


def test_an_agent_whose_first_call_is_forced(server: Server) -> None:
    booked: list[tuple[str, int]] = []

    import agents  # takes seconds

    @agents.function_tool
    def book(city: Literal["Paris", "Rome"], nights: Literal[1, 2, 3]) -> str:
        """Book a hotel."""
        booked.append((city, nights))
        return "done"

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
            settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=100)
            agent = agents.Agent(name="Agent", model=model, tools=[book], model_settings=settings)
            return await agents.Runner.run(agent, "Book!", max_turns=2)

    agents.set_tracing_disabled(True)
    result = asyncio.run(run())
    ((city, nights),) = booked
    assert city in ("Paris", "Rome") and nights in (1, 2, 3)
    assert isinstance(result.final_output, str)
