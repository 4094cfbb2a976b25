"""The Responses API and the Messages API as their own clients use them: `openai` and `anthropic` against a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import MODEL, write_tiny_model

pytestmark = pytest.mark.slow

KEY, OTHER = "sk-of-the-tests", "sk-another"
LETTERS = {str(token): 100 for token in range(ord("a"), ord("z") + 1)}
GREEDY = {"temperature": 0, "extra_body": {"logit_bias": LETTERS}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
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
    end = time.monotonic() + 60
    while (found := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.05)
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
