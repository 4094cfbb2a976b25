"""/v1/audio/…: forms with recordings in, text in all its forms back; bad ones are refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.routes.audio import TranscriptionRequest, TranslationRequest
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import EngineError
from ratoon.core.messages import EngineReady
from ratoon.engine.async_llm import AsyncLLM
from tests.unit.api.server.harness import MODEL, Answer, Client, scripted
from tests.unit.engine.fakes_async import FakeAsyncClient, on_event_loop
from tests.unit.transcription.engines import SpeechClient, Texts, aligned_source, speech_source
from tests.unit.transcription.speech import (
    ENGLISH,
    GERMAN,
    MAX_LENGTH,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    needs_av,
    tone,
    wav,
)

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
BOUNDARY = "----a-boundary"
TONE = wav(tone(1))


def part(name: str, value: bytes, filename: str | None = None, boundary: str = BOUNDARY) -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    return f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value + b"\r\n"


def form(file: bytes | None = TONE, **fields: Any) -> bytes:
    """Lists become several values of `name[]`."""
    body = b"" if file is None else part("file", file, "talk.wav")
    for name, value in fields.items():
        if isinstance(value, list):
            body += b"".join(part(f"{name}[]", str(one).encode()) for one in value)
        else:
            body += part(name, str(value).encode())
    return body + f"--{BOUNDARY}--\r\n".encode()


async def post(client: Client, path: str, body: bytes, **headers: str) -> Answer:
    given = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "host": "localhost:8000", **headers}
    return await client.post(path, body, headers=given)


async def transcribe(client: Client, file: bytes | None = TONE, **fields: Any) -> Answer:
    return await post(client, TRANSCRIPTIONS, form(file, **{"model": MODEL, **fields}))


@contextlib.asynccontextmanager
async def speaking(
    texts: Texts | None = None, *, by_hand: bool = False, folder: Path | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """A server with a speech model that plays a script."""
    engine = FakeAsyncClient(by_hand=by_hand)
    engine.core = SpeechClient((lambda request: "<0.00> Hello.<1.00>") if texts is None else texts)
    engine.ready = EngineReady({"device": "fake"}, MAX_LENGTH, 16)
    llm = AsyncLLM(MODEL, client=engine)
    source = speech_source() if folder is None else aligned_source(folder)
    with mock.patch("ratoon.models.source.resolve_model", return_value=source):
        await llm.start()
    try:
        yield Client(ServerContext(llm, ServerSettings(**settings)), engine)
        assert llm.num_unfinished_requests() == 0 or by_hand
        assert not llm.list_roots(), "nobody goes on from a window"
    finally:
        await llm.shutdown()


# ---- answers ----


@on_event_loop
async def test_a_transcription():
    async with speaking() as client:
        answer = await transcribe(client)
        assert answer.status == 200
        assert answer.json() == {"text": "Hello.", "usage": {"type": "duration", "seconds": 1}}
        assert answer.headers["content-type"] == "application/json"
        assert "x-request-id" in answer.headers
        (window,) = client.engine.core.windows
        assert window.prompt_token_ids == [START, ENGLISH, TRANSCRIBE]
        assert client.context.num_unfinished == 0


@on_event_loop
async def test_a_translation():
    async with speaking() as client:
        body = form(model=MODEL, language="de", response_format="verbose_json")
        answer = await post(client, TRANSLATIONS, body)
        assert (answer.json()["task"], answer.json()["language"]) == ("translate", "german")
        assert client.engine.core.windows[0].prompt_token_ids == [START, GERMAN, TRANSLATE]


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ("text", "text/plain; charset=utf-8", "Hello.\n"),
        ("srt", "application/x-subrip; charset=utf-8", "1\n00:00:00,000 --> 00:00:01,000\nHello.\n\n"),
        ("vtt", "text/vtt; charset=utf-8", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello.\n\n"),
    ],
)
@on_event_loop
async def test_other_forms(form, kind, text):
    async with speaking() as client:
        answer = await transcribe(client, response_format=form)
        assert (answer.status, answer.headers["content-type"], answer.body.decode()) == (200, kind, text)


@on_event_loop
async def test_the_long_json():
    async with speaking() as client:
        answer = await transcribe(client, response_format="verbose_json", timestamp_granularities=["segment"])
        found = answer.json()
        assert (found["task"], found["language"], found["duration"]) == ("transcribe", "english", 1.0)
        (segment,) = found["segments"]
        assert (segment["id"], segment["start"], segment["end"], segment["text"]) == (0, 0, 1, " Hello.")
        assert segment["no_speech_prob"] == pytest.approx(0.01)
        assert segment["avg_logprob"] == pytest.approx(math.log(0.75) * 9 / 10)


@on_event_loop
async def test_fields_reach_the_engine():
    async with speaking() as client:
        fields = {"language": "de", "prompt": "Names", "temperature": "0.5", "cache_salt": "mine", "request_id": "mine"}
        assert (await transcribe(client, **fields)).status == 200
        (window,) = client.engine.core.windows
        assert window.prompt_token_ids == [PREVIOUS, *b" Names", START, GERMAN, TRANSCRIBE]
        assert window.params.temperature == 0.5
        assert window.cache_salt == "mine"
        assert window.external_id.startswith("trsc-mine-")
        assert (await transcribe(client, beam_size=3, temperature="")).status == 200
        assert client.engine.core.windows[-1].params.beam_width == 3


@on_event_loop
async def test_a_temperature_of_zero_may_rise_and_any_other_is_kept():
    async with speaking() as client:
        client.engine.core.logprob = -3.0
        await transcribe(client, temperature=0)
        assert [window.params.temperature for window in client.engine.core.windows] == [
            0,
            0.2,
            0.4,
            0.6,
            0.8,
            1,
        ]
        client.engine.core.added.clear()
        await transcribe(client, temperature=0.3)
        assert [window.params.temperature for window in client.engine.core.windows] == [0.3]


# ---- streams ----


@on_event_loop
async def test_a_stream_brings_segments_as_windows_are_done():
    texts = ["<0.00> One,<10.00><10.00> two,<30.00><30.00>", "<0.00> three.<9.00>"]
    async with speaking(texts) as client:
        answer = await transcribe(client, wav(tone(40)), language="en", stream="true")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.events() == [
            {"type": "transcript.text.delta", "delta": "One,"},
            {"type": "transcript.text.delta", "delta": " two,"},
            {"type": "transcript.text.delta", "delta": " three."},
            {
                "type": "transcript.text.done",
                "text": "One, two, three.",
                "usage": {"type": "duration", "seconds": 40},
            },
        ]


@on_event_loop
async def test_a_stream_of_the_long_json_has_the_times_of_segments():
    texts = ["<0.00> One,<10.00><10.00> two,<30.00><30.00>", "<0.00> three.<9.00>"]
    async with speaking(texts) as client:
        answer = await transcribe(client, wav(tone(40)), language="en", stream="true", response_format="verbose_json")
        *events, done = answer.events()
        assert [event.get("delta") for event in events] == ["One,", None, " two,", None, " three.", None]
        assert events[1::2] == [
            {"type": "transcript.text.segment", "id": 0, "start": 0, "end": 10, "text": " One,"},
            {"type": "transcript.text.segment", "id": 1, "start": 10, "end": 30, "text": " two,"},
            {"type": "transcript.text.segment", "id": 2, "start": 30, "end": 39, "text": " three."},
        ]
        assert (done["type"], done["text"], done["duration"]) == ("transcript.text.done", "One, two, three.", 40)
        assert [segment["end"] for segment in done["segments"]] == [10, 30, 39]
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["input_modalities"] for model in listed] == [["audio"]]


@on_event_loop
async def test_a_stream_of_silence_ends_well():
    async with speaking([""]) as client:
        answer = await transcribe(client, stream=True)
        assert [event["type"] for event in answer.events()] == ["transcript.text.done"]


@on_event_loop
async def test_what_is_wrong_is_said_with_a_status_before_a_stream_begins():
    async with speaking() as client:
        assert (await transcribe(client, b"nonsense", stream=True)).status == 400
        answer = await transcribe(client, stream=True, response_format="srt")
        assert (answer.status, answer.error["param"]) == (400, "response_format")
        assert client.context.num_unfinished == 0


@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_a_client_that_goes_away_takes_its_windows_along(stream):
    async with speaking(by_hand=True) as client:
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        request = client.open("POST", TRANSCRIPTIONS, form(model=MODEL, stream=stream), headers=headers)
        while not client.engine.core.added:
            await asyncio.sleep(0.001)
        request.disconnect()
        await request.task
        assert client.context.num_unfinished == 0
        assert client.context.llm.num_unfinished_requests() == 0
        assert len(client.engine.core.aborted) == 1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (b"", "file: is empty"),
        pytest.param(b"nonsense", "file: can't be read as a recording", marks=needs_av),
        (wav(tone(0)), "file: is 0 seconds long"),
        pytest.param(wav(tone(1))[:20], "file: can't be read as a recording", marks=needs_av),
    ],
)
@on_event_loop
async def test_what_is_no_recording(file, problem):
    async with speaking() as client:
        answer = await transcribe(client, file)
        assert (answer.status, answer.error["param"]) == (400, "file")
        assert answer.error["message"].startswith(problem)
        assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", "7"),
        ("response_format", "yaml"),
        ("stream", "perhaps"),
        ("beam_size", "2.5"),
        ("beam_size", "0"),
        ("language", "xx"),
        ("prompt", "<|endoftext|>"),
        ("timestamp_granularities", ["hour"]),
        ("priority", "3"),
        ("request_id", "a b"),
        ("include", ["logprobs"]),
        ("chunking_strategy", "auto"),
        ("temprature", "0"),
    ],
)
@on_event_loop
async def test_fields_without_meaning_are_named(field, value):
    async with speaking() as client:
        answer = await transcribe(client, **{field: value})
        assert answer.status == 400
        assert answer.error["param"].startswith(field)
        assert not client.engine.core.windows


@pytest.mark.parametrize("granularities", [["word"], ["segment", "word"], "word"])
@on_event_loop
async def test_words_of_a_transcription(tmp_path, granularities):
    async with speaking(folder=tmp_path) as client:
        answer = await transcribe(client, response_format="verbose_json", timestamp_granularities=granularities)
        assert answer.status == 200
        found = answer.json()
        assert [word["word"] for word in found["words"]] == ["Hello."]
        assert 0 <= found["words"][0]["start"] <= found["words"][0]["end"] <= 1
        assert found["segments"][0]["text"] == " Hello."
        plain = await transcribe(client, response_format="verbose_json", timestamp_granularities=["segment"])
        assert "words" not in plain.json()


@on_event_loop
async def test_words_are_in_the_events_of_a_stream(tmp_path):
    async with speaking(folder=tmp_path) as client:
        answer = await transcribe(client, stream="true", timestamp_granularities=["word"])
        first, *_ = answer.events()
        assert first["delta"] == "Hello." and [word["word"] for word in first["words"]] == ["Hello."]


@pytest.mark.parametrize("form_of_answer", ["json", "text", "srt", "vtt"])
@on_event_loop
async def test_words_need_a_form_that_has_them_and_a_model_that_finds_them(tmp_path, form_of_answer):
    async with speaking(folder=tmp_path) as client:
        answer = await transcribe(client, response_format=form_of_answer, timestamp_granularities=["word"])
        assert (answer.status, answer.error["param"]) == (400, "timestamp_granularities")
        assert f"{form_of_answer} has no place for word timestamps" in answer.error["message"]
    async with speaking() as client:
        answer = await transcribe(client, response_format="verbose_json", timestamp_granularities=["word"])
        assert (answer.status, answer.error["param"]) == (400, "timestamp_granularities")
        assert "names no alignment_heads" in answer.error["message"]
        assert not client.engine.core.windows


@on_event_loop
async def test_missing_and_doubled_fields_are_named():
    async with speaking() as client:
        assert (await post(client, TRANSCRIPTIONS, form(model=MODEL, file=None))).error["param"] == "file"
        assert (await post(client, TRANSCRIPTIONS, form(model=""))).status == 200  # which is left out
        twice = part("model", b"tiny") + form(model=MODEL)
        assert (await post(client, TRANSCRIPTIONS, twice)).error["param"] == "model"
        assert (await transcribe(client, model="other")).status == 404


@on_event_loop
async def test_translations_have_no_granularities():
    async with speaking() as client:
        body = form(model=MODEL, timestamp_granularities=["segment"])
        assert (await post(client, TRANSLATIONS, body)).error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("strict", [False, True])
@on_event_loop
async def test_unknown_fields_of_a_form_are_ignored_or_refused(strict):
    async with speaking(strict=strict) as client:
        answer = await transcribe(client, seed="5")
        assert answer.status == (400 if strict else 200)
        assert strict or answer.headers["x-ratoon-ignored-fields"] == "seed"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        form(model=MODEL)[:-20],
        form(model=MODEL).replace(b'name="file"', b'nome="file"'),
        form(model=MODEL).replace(BOUNDARY.encode(), b"----another"),
        b"".join(part(f"field{number}", b"x") for number in range(100)) + form(model=MODEL),
        part("model", b"\xff\xfe") + form(),
        part("model", b"x" * (2**20 + 1)) + form(),
        part("file", TONE) + form(file=None, model=MODEL),
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\nx\r\n' % (BOUNDARY.encode(), b"n" * 10_000),
    ],
)
@on_event_loop
async def test_what_is_no_proper_form_is_refused(body):
    async with speaking() as client:
        answer = await post(client, TRANSCRIPTIONS, body)
        assert answer.status == 400, answer.body
        assert len(answer.body) < 600


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "text/plain", ""])
@on_event_loop
async def test_what_is_no_form_at_all_is_refused(kind):
    async with speaking() as client:
        answer = await client.post(TRANSCRIPTIONS, form(model=MODEL), headers={"content-type": kind})
        assert answer.status == 415


@on_event_loop
async def test_web_pages_of_other_origins_are_turned_away():
    async with speaking(cors_origins=("https://good.example",)) as client:
        body = form(model=MODEL)
        for origin, status in (
            ("https://evil.example", 403),
            ("null", 403),
            ("https://good.example", 200),
            ("http://localhost:8000", 200),
        ):
            assert (await post(client, TRANSCRIPTIONS, body, origin=origin)).status == status


@needs_av
@on_event_loop
async def test_recordings_have_limits_of_their_own():
    async with speaking(max_body=1000, max_audio=50_000, max_audio_seconds=1.0) as client:
        assert (await transcribe(client)).status == 200
        answer = await transcribe(client, wav(tone(2)))
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert "--max-audio" in answer.error["message"]
        answer = await transcribe(client, wav(tone(2, 8000), 8000))
        assert (answer.status, answer.error["param"]) == (400, "file")
        assert "longer than 1 seconds" in answer.error["message"]
        assert (await client.post("/v1/completions", {"prompt": "x" * 1000})).status == 413


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
@on_event_loop
async def test_a_model_that_does_not_read_audio_says_so(path):
    async with scripted() as client:
        answer = await post(client, path, form(model=MODEL))
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "does not read audio" in answer.error["message"]


@on_event_loop
async def test_a_full_queue_turns_recordings_away():
    async with speaking(max_queue=1) as client:
        async with client.context.admit(1, None):
            for stream in (False, True):
                assert (await transcribe(client, stream=stream)).status == 429
        assert (await transcribe(client)).status == 200


@on_event_loop
async def test_an_engine_that_fails_is_a_500():
    async with speaking() as client:
        client.engine.core.refuse = lambda request: EngineError("broken")
        answer = await transcribe(client)
        assert answer.status == 500
        assert answer.error["type"] == "server_error"
        assert client.context.num_unfinished == 0


@on_event_loop
async def test_the_document_shows_the_form():
    async with speaking() as client:
        document = (await client.get("/openapi.json")).json()
        operation = document["paths"][TRANSCRIPTIONS]["post"]
        content = operation["requestBody"]["content"]["multipart/form-data"]
        assert content["schema"] == {"$ref": "#/components/schemas/TranscriptionRequest"}
        file = document["components"]["schemas"]["TranscriptionRequest"]["properties"]["file"]
        assert (file["type"], file["format"]) == ("string", "binary")
        kinds = set(operation["responses"]["200"]["content"])
        assert {"application/json", "text/event-stream", "text/plain", "text/vtt"} <= kinds
        json.dumps(document)


@pytest.mark.parametrize("model", [TranscriptionRequest, TranslationRequest])
def test_every_field_is_documented(model):
    text = (Path(__file__).parents[4] / "docs/speech.md").read_text()
    for name in (*model.model_fields, *model.UNSUPPORTED):
        assert re.search(rf"`{name}(\[\])?`", text), name
