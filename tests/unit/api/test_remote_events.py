"""Server-sent events: whole, however the bytes are cut on their way."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.api.remote.client import EventReader, decode_chunk

EVENTS = (
    b': ping\n\ndata: {"a":"\xc3\xa9"}\n\nevent: x\ndata:{"b":1}\nid: 3\n\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
)
PAYLOADS = [b'{"a":"\xc3\xa9"}', b'{"b":1}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, 200), max_size=20), st.booleans())
def test_events_do_not_depend_on_how_the_stream_is_cut(cuts, carriage_returns):
    stream = EVENTS.replace(b"\n", b"\r\n") if carriage_returns else EVENTS
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = EventReader()
    found = [payload for begin, end in itertools.pairwise(places) for payload in reader.feed(stream[begin:end])]
    assert found == PAYLOADS


def test_an_event_that_has_not_ended_is_kept_back():
    reader = EventReader()
    assert reader.feed(b"data: hal") == []
    assert reader.feed(b"f\n") == []
    assert reader.feed(b"\n") == [b"half"]


def test_a_chunk_holds_what_is_needed_of_what_servers_send():
    chunk = decode_chunk(
        b'{"id": "1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": null,'
        b' "tool_calls": []}, "logprobs": null, "finish_reason": null}], "usage": null, "system_fingerprint": "x"}'
    )
    assert chunk.choices[0].new_text == "" and not chunk.choices[0].has_text
    assert chunk.usage is None


def test_what_is_no_chunk_is_an_error():
    with pytest.raises(msgspec.DecodeError):
        decode_chunk(b'{"choices": 3}')
