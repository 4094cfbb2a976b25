"""What `ratoon chat` sends to a server: the new messages alone where the server continues its own answers, else the
whole conversation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from ratoon.api.commands.chat_answerers import PrintedAnswer, RemoteAnswerer
from ratoon.api.remote.client import RefusedError

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class FakeClient:
    """A server that answers "1", "2" and so on, and knows its answers unless it is told to forget them."""

    url = "http://server"

    def __init__(self, owner: str = "ratoon", delta: str = "content") -> None:
        self.owner = owner
        self.delta = delta
        self.bodies: list[dict[str, Any]] = []
        self.forgets = False
        self.fails = False
        self.num_asked = 0

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def get(self, path: str) -> Any:
        assert path == "/v1/models"
        self.num_asked += 1
        return {"data": [{"id": "m", "owned_by": self.owner}]}

    async def stream(self, path: str, body: Any, receive: Callable[..., None], decode: Callable[..., Any]) -> None:
        self.bodies.append({**body, "messages": list(body["messages"])})
        if self.forgets and "continuation_of" in body:
            raise RefusedError("server", "unknown", kind="HTTP 404", status=404)
        number = str(len(self.bodies))
        delta = {self.delta: number}
        chunk = {"id": f"chatcmpl-{number}", "choices": [{"index": 0, "delta": delta}]}
        receive([decode(msgspec.json.encode(chunk))])
        if self.fails:
            raise KeyboardInterrupt


class Chat:
    def __init__(self, client: FakeClient, **fields: Any) -> None:
        self.client = client
        self.answerer = RemoteAnswerer(client, "m", fields)  # type: ignore[arg-type]
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]

    def say(self, content: Any) -> dict[str, Any]:
        """Sends a message. Returns the last body that the server got."""
        self.messages.append({"role": "user", "content": content})
        answer = PrintedAnswer()
        with suppress(KeyboardInterrupt):
            self.answerer.answer(self.messages, answer)
        self.messages.append({"role": "assistant", "content": answer.text})
        return self.client.bodies[-1]


def test_a_later_turn_has_its_own_messages_and_images_alone() -> None:
    chat = Chat(FakeClient(), temperature=0)
    first = chat.say([IMAGE, {"type": "text", "text": "What?"}])
    assert "continuation_of" not in first and len(first["messages"]) == 2
    second = chat.say([IMAGE, {"type": "text", "text": "And?"}])
    assert second["messages"] == [{"role": "user", "content": [IMAGE, {"type": "text", "text": "And?"}]}]
    assert (second["continuation_of"], second["temperature"], second["stream"]) == ("chatcmpl-1", 0, True)
    assert chat.say("More?")["continuation_of"] == "chatcmpl-2"
    assert chat.client.num_asked == 1, "the server is asked once whether it is one"


def test_a_server_that_has_forgotten_the_answer_gets_the_whole_conversation() -> None:
    chat = Chat(FakeClient())
    chat.say("One")
    chat.client.forgets = True
    whole = chat.say("Two")
    assert [message["content"] for message in whole["messages"]] == ["Be brief.", "One", "1", "Two"]
    chat.client.forgets = False
    assert chat.say("Three")["continuation_of"] == "chatcmpl-3"


@pytest.mark.parametrize(
    ("client", "fields"),
    [
        (FakeClient(owner="another"), {}),
        (FakeClient(), {"stop": ["x"]}),  # the text may end before the generated tokens do
        (FakeClient(delta="reasoning_content"), {}),  # templates leave it out of later turns
    ],
)
def test_other_answers_are_sent_back_in_the_whole_conversation(client: FakeClient, fields: dict[str, Any]) -> None:
    chat = Chat(client, **fields)
    chat.say("One")
    assert "continuation_of" not in chat.say("Two")
    assert len(chat.client.bodies[-1]["messages"]) == 4


def test_after_an_answer_that_was_stopped_and_after_a_reset_the_conversation_is_sent() -> None:
    chat = Chat(FakeClient())
    chat.client.fails = True
    chat.say("One")
    chat.client.fails = False
    assert "continuation_of" not in chat.say("Two")
    chat.messages = chat.messages[:1]
    assert "continuation_of" not in chat.say("Three")
    assert "continuation_of" in chat.say("Four")
    # One that is continued (/continue) is the whole conversation, and so is the message behind it.
    chat.answerer.answer(chat.messages, PrintedAnswer())
    assert chat.client.bodies[-1]["continue_final_message"] is True
    chat.messages[-1] = {**chat.messages[-1], "content": "more"}
    assert "continuation_of" not in chat.say("Five")
