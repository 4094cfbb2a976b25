"""The Responses API and the Messages API as their own clients use them: `openai` and `anthropic` against a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

KEY, OTHER = "sk-of-the-tests", "sk-another"
LETTERS = {str(token): 100 for token in range(ord("a"), ord("z") + 1)}
GREEDY = {"temperature": 0, "extra_body": {"logit_bias": LETTERS}}
TEMPLATE = (
    "{% if tools %}[{{ tools | length }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    template: Path = folder / "template.jinja"
    template.write_text(TEMPLATE)
    model = write_tiny_model(folder / MODEL)
    with serving(model, "--chat-template", str(template), RATOON_API_KEY=f"{KEY},{OTHER}") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.check
def test_a_conversation_computes_only_what_is_new(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "max_output_tokens": 8, "instructions": "Answer", **GREEDY}
    first = client.responses.create(input="What is the capital of Japan?", **fields)
    assert first.status == "incomplete" and first.output_text.isalpha()
    second = client.responses.create(input="And?", previous_response_id=first.id, **fields)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert second.model_extra is not None and second.model_extra["continuation"]["source"] == "lease"
    fork = client.responses.create(input="Or?", previous_response_id=first.id, **fields)
    assert fork.usage is not None
    assert fork.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.id for item in items][1] == first.output[0].id and len(list(items)) == 3
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_conversation_with_a_name(client: openai.OpenAI, server: Server) -> None:
    made = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "What is the capital of Japan?"}], metadata={"a": "b"}
    )
    assert made.metadata == {"a": "b"} and client.conversations.retrieve(made.id).created_at == made.created_at
    fields = {"model": MODEL, "max_output_tokens": 8, **GREEDY}
    first = client.responses.create(input="Answer", conversation=made.id, **fields)
    second = client.responses.create(input="And?", conversation={"id": made.id}, **fields)
    assert second.conversation is not None and second.conversation.id == made.id
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    with client.responses.stream(input="Or?", conversation=made.id, **fields) as stream:
        third = list(stream)[-1].response  # incomplete, as it is cut
    added = client.conversations.items.create(
        made.id, items=[{"type": "message", "role": "user", "content": "By the way"}]
    )
    items = list(client.conversations.items.list(made.id, order="asc", limit=3))  # in pages of three
    texts = [part.text for item in items for part in item.content]
    assert texts == [
        "What is the capital of Japan?", "Answer", first.output_text, "And?", second.output_text, "Or?",
        third.output_text, "By the way",
    ]  # fmt: skip
    one = client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert one.content[0].text == "By the way"
    assert client.conversations.items.delete(one.id, conversation_id=made.id).id == made.id
    assert len(list(client.conversations.items.list(made.id))) == 7
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    with openai.OpenAI(base_url=server.api, api_key=OTHER, max_retries=0) as other:
        with pytest.raises(openai.NotFoundError):
            other.conversations.items.list(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(input="x", conversation=made.id, **fields)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_a_stream_ends_with_the_whole_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=8, **GREEDY) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == text and len(text) == 8
    end = {"temperature": 0, "extra_body": {"logit_bias": {"256": 100}}}  # the end of the turn, at once
    with client.responses.stream(model=MODEL, input="Hello", **end) as stream:
        assert stream.get_final_response().output_text == ""


def test_the_background(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, background=True, **GREEDY)
    assert made.status in ("queued", "in_progress")
    wait_until("it ends", lambda: client.responses.retrieve(made.id).status not in ("queued", "in_progress"))
    found = client.responses.retrieve(made.id)
    assert found.status == "incomplete" and len(found.output_text) == 8
    assert client.responses.cancel(made.id).status == "incomplete"
    number = 0
    for event in client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=40, background=True, stream=True, **GREEDY
    ):
        if event.type == "response.created":
            made = event.response
        if event.type == "response.output_text.delta":
            number = event.sequence_number
            break  # and close the connection
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=number))
    assert rest[0].sequence_number == number + 1 and rest[-1].type == "response.incomplete"


def test_another_key_finds_nothing(client: openai.OpenAI, server: Server) -> None:
    made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
    with openai.OpenAI(base_url=server.api, api_key=OTHER, max_retries=0) as other:
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model=MODEL, input="And?", previous_response_id=made.id)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mood: Literal["good", "bad"]


def test_a_text_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    no_blanks = {"logit_bias": {str(ord(blank)): -100 for blank in " \t\r\n"}}  # a random model writes nothing else
    found = client.responses.parse(
        model=MODEL, input="How are you?", text_format=Answer, temperature=0, extra_body=no_blanks
    )
    assert found.status == "completed" and isinstance(found.output_parsed, Answer)
    wrong = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "dance"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", text=wrong)
    assert caught.value.param == "text.format.schema"


@pytest.mark.check
def test_a_call_is_enforced_and_its_result_continues_the_conversation(client: openai.OpenAI) -> None:
    parameters = Answer.model_json_schema()
    tool = {"type": "function", "name": "tell", "parameters": parameters, "strict": True}
    fields = {"model": MODEL, "tools": [tool], "parallel_tool_calls": False, "temperature": 0}
    first = client.responses.create(input="How are you?", tool_choice="required", **fields)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "tell" and Answer.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "told"}
    # Not tool_choice none: then the prompt has no tools, and nothing in common with that of the first turn.
    second = client.responses.create(input=[result], previous_response_id=first.id, max_output_tokens=4, **fields)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.model_extra is not None and second.model_extra["continuation"]["source"] == "lease"


def test_an_agent_calls_its_tool(server: Server) -> None:
    called = []

    import agents  # takes seconds

    @agents.function_tool
    def tell(mood: Literal["good", "bad"]) -> str:
        """Say how you are."""
        called.append(mood)
        return "told"

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=server.api, api_key=KEY, max_retries=0) as client:
            model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
            settings = agents.ModelSettings(tool_choice="required", temperature=0, parallel_tool_calls=False)
            agent = agents.Agent(
                name="Agent",
                instructions="Help.",
                model=model,
                tools=[tell],
                model_settings=settings,
                tool_use_behavior="stop_on_first_tool",
            )
            return (await agents.Runner.run(agent, "How are you?")).final_output

    agents.set_tracing_disabled(True)
    assert asyncio.run(run()) == "told" and called[0] in ("good", "bad")


def test_messages_with_a_tool(claude: anthropic.Anthropic) -> None:
    tool = {"name": "tell", "input_schema": Answer.model_json_schema()}
    conversation: list = [{"role": "user", "content": "How are you?"}]
    fields = {"model": MODEL, "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "tool", "name": "tell"}}
    first = claude.messages.create(messages=conversation, **fields)
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert Answer.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "told"}
    conversation += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with claude.messages.stream(messages=conversation, **fields) as stream:
        final = stream.get_final_message()
    assert [block.name for block in final.content if block.type == "tool_use"] == ["tell"]


@pytest.mark.check
def test_messages(claude: anthropic.Anthropic) -> None:
    fields = {
        "model": MODEL,
        "max_tokens": 8,
        "system": "Answer",
        "messages": [{"role": "user", "content": "Hello"}],
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**fields)
    assert whole.type == "message" and whole.usage.output_tokens <= 8
    with claude.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason
    assert [block.text for block in whole.content if block.type == "text"] == ([text] if text else [])
    counted = claude.messages.count_tokens(model=MODEL, system="Answer", messages=fields["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(**{**fields, "max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**fields, "model": "other"})
