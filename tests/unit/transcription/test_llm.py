"""LLM.transcribe and `ratoon transcribe`, on an engine that plays a script."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from types import ModuleType

import numpy as np
import pytest

from ratoon.api.llm import LLM
from ratoon.cli import main
from ratoon.core.errors import EngineError, RequestError
from ratoon.core.params import SamplingParams
from ratoon.transcription import transcriber
from tests.unit.engine.fakes import model_config
from tests.unit.transcription.engines import SpeechClient, aligned_source, speech_source
from tests.unit.transcription.speech import ENGLISH, PREVIOUS, RATE, START, TRANSCRIBE, needs_av, tone, wav

TONE = wav(tone(1))


def two_windows(request) -> str:
    """Of a recording of 40 seconds; behind its end, its second window has zeros."""
    features = np.frombuffer(request.encoder_input.features.data, np.float32).reshape(80, 3000)
    return "<0.00> second<9.00>" if not features[:, 1000:].any() else "<0.00> first<30.00><30.00>"


@pytest.fixture
def source():
    return speech_source()


@pytest.fixture
def client(monkeypatch, source) -> SpeechClient:
    made = SpeechClient(lambda request: "<0.00> Hello.<1.00>")
    models, clients = ModuleType("ratoon.models.source"), ModuleType("ratoon.engine.processes.client")
    models.resolve_model = lambda name, *_: source
    clients.make_client = lambda config, source, timer, process: made
    monkeypatch.setitem(sys.modules, "ratoon.models.source", models)
    monkeypatch.setitem(sys.modules, "ratoon.engine.processes.client", clients)
    return made


@pytest.fixture
def llm(client) -> LLM:
    return LLM("tiny")


def test_one_recording_is_one_transcription(llm, client):
    found = llm.transcribe(TONE)
    assert (found.text, found.language, found.duration) == ("Hello.", "en", 1.0)
    assert found.language_probability == pytest.approx(0.75)
    (window,) = client.windows
    assert window.prompt_token_ids == [START, ENGLISH, TRANSCRIBE]
    assert window.encoder_input.features.shape == (80, 3000)
    assert window.encoder_input.num_positions == 1500
    assert window.params.timestamps is not None
    assert llm.engine.num_unfinished_requests() == 0


def test_all_questions_about_a_window_are_about_the_same_encoder_input(llm, client):
    llm.transcribe(TONE)
    assert len(client.added) == 3
    assert len({request.encoder_input.content_hash for request in client.added}) == 1


def test_several_recordings_run_together_and_come_back_in_order(llm, client, monkeypatch):
    most = num_read = 0
    all_read = asyncio.Event()
    read = transcriber.read_recording

    def watch():
        nonlocal most
        most = max(most, llm.engine.num_unfinished_requests())

    async def read_together(*arguments):
        """However long a thread takes for one of them, all begin together."""
        nonlocal num_read
        recording = await read(*arguments)
        num_read += 1
        if num_read == 3:
            all_read.set()
        await all_read.wait()
        return recording

    monkeypatch.setattr(transcriber, "read_recording", read_together)
    client.on_step = watch
    client.texts = two_windows
    found = llm.transcribe([TONE, wav(tone(40)), (tone(1)[:, 0] / 32768, RATE)], no_speech_threshold=None)
    assert [one.text for one in found] == ["first", "first second", "first"]
    assert [one.duration for one in found] == [1, 40, 1]
    assert most >= 2
    assert llm.transcribe([]) == []


@needs_av
def test_one_that_fails_does_not_disturb_the_others(llm, client):
    found = llm.transcribe([b"", TONE, b"nonsense"])
    assert [one.text for one in found] == ["", "Hello.", ""]
    assert found[0].error == "file: is empty; a recording"
    assert found[1].error is None
    assert found[2].error.startswith("file: can't be read as a recording")
    with pytest.raises(RequestError, match="file: is empty"):
        llm.transcribe(b"")


def test_what_is_wrong_for_all_is_said_once(llm, client):
    with pytest.raises(RequestError, match="language: 'xx' is not supported by the model"):
        llm.transcribe([TONE, TONE], language="xx")
    assert not client.added


def test_options_reach_the_engine(llm, client):
    found = llm.transcribe(
        TONE, language="german", task="translate", timestamps=False, prompt="Names", temperature=0.3, beam_size=4
    )
    assert found.language == "de"
    (window,) = client.windows
    assert window.prompt_token_ids[:7] == [PREVIOUS, *b" Names"]
    assert window.params.temperature == 0.3
    assert window.params.timestamps is None
    assert isinstance(window.params, SamplingParams)
    llm.transcribe(TONE, beam_size=4, condition_on_previous_text=True)
    assert client.windows[-1].params.beam_width == 4
    with pytest.raises(RequestError, match="beam_size"):
        llm.transcribe(TONE, beam_size=0)
    with pytest.raises(TypeError, match="beans"):
        llm.transcribe(TONE, beans=4)


def test_a_model_that_does_not_read_audio_says_so(llm, source):
    source.config = model_config()
    with pytest.raises(RequestError, match="model: does not read audio"):
        llm.transcribe(TONE)


def test_an_engine_that_refuses_or_fails_is_heard_of(llm, client):
    client.refuse = lambda request: RequestError("encoder_prompt", "is too much")
    with pytest.raises(RequestError, match="is too much"):
        llm.transcribe(TONE)
    client.refuse = lambda request: None

    def fail():
        raise EngineError("out of order")

    client.on_step = fail
    with pytest.raises(EngineError, match="out of order"):
        llm.transcribe(TONE)
    client.on_step = lambda: None
    assert llm.transcribe(TONE).text == "Hello."


def test_windows_are_not_kept_to_be_continued(llm):
    llm.transcribe(TONE)
    assert len(llm.engine.output_processor.roots) == 0


def test_a_stream_that_is_open_gets_its_own_outputs(llm, client):
    client.texts = lambda request: " one two three four" if request.params.timestamps is None else "<0.00> x<1.00>"
    features = np.zeros((80, 3000), np.float32)
    prompt = {"encoder_prompt": {"features": features}, "decoder_prompt": {"prompt_token_ids": [START]}}
    stream = llm.stream(prompt, SamplingParams(max_tokens=100))
    pieces = [next(stream).outputs[0].text]
    assert llm.transcribe(TONE).text == "x"
    pieces += [output.outputs[0].text for output in stream]
    assert "".join(pieces) == " one two three four"


def test_it_works_where_an_event_loop_runs_already(llm):
    async def in_a_notebook():
        return llm.transcribe(TONE)

    assert asyncio.run(in_a_notebook()).text == "Hello."


def test_an_interrupt_takes_everything_back(llm, client):
    def interrupt():
        raise KeyboardInterrupt

    client.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.transcribe([TONE, TONE])
    client.on_step = lambda: None
    assert llm.engine.num_unfinished_requests() == 0
    assert llm.transcribe(TONE).text == "Hello."


# ---- the command ----


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "talk.wav"
    path.write_bytes(TONE)
    return path


def test_the_command_prints_the_text(client, recording, capsys):
    assert main(["transcribe", "tiny", str(recording)]) == 0
    assert capsys.readouterr().out == "Hello.\n"


@needs_av
def test_several_recordings_are_printed_with_their_names(client, recording, tmp_path, capsys):
    other = tmp_path / "other.wav"
    other.write_bytes(wav(tone(2, 8000), 8000))
    assert main(["transcribe", "tiny", str(recording), "--language", "en", str(other)]) == 0
    assert capsys.readouterr().out == f"=== {recording}\nHello.\n=== {other}\nHello.\n"
    assert main(["transcribe", "tiny", str(recording), str(other), "--format", "json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["file"], line["text"]) for line in lines] == [(str(recording), "Hello."), (str(other), "Hello.")]


@pytest.mark.parametrize(
    ("form", "name", "content"),
    [
        ("text", "talk.txt", "Hello.\n"),
        ("srt", "talk.srt", "1\n00:00:00,000 --> 00:00:01,000\nHello.\n\n"),
        ("vtt", "talk.vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello.\n\n"),
        ("json", "talk.json", '{"text": "Hello.", "usage": {"type": "duration", "seconds": 1}}\n'),
    ],
)
def test_files_are_written_to_a_folder(client, recording, tmp_path, capsys, form, name, content):
    folder = tmp_path / "out" / "of it"  # made where it is not there
    assert main(["transcribe", "tiny", str(recording), "--format", form, "--output-dir", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / name}\n"
    assert (folder / name).read_text() == content


def test_a_recording_may_come_from_standard_input(client, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TONE)))
    assert main(["transcribe", "tiny", "-", "--format", "srt"]) == 0
    assert capsys.readouterr().out.endswith("Hello.\n\n")


@needs_av
def test_a_recording_that_can_not_be_read_is_named(client, recording, tmp_path, capsys):
    broken = tmp_path / "broken.mp3"
    broken.write_bytes(b"nonsense")
    assert main(["transcribe", "tiny", str(broken), str(recording)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {broken}: file: can't be read as a recording")
    assert printed.out == f"=== {recording}\nHello.\n"
    assert main(["transcribe", "tiny", str(broken)]) == 1


def test_what_is_missing_or_can_not_be_written_does_not_stop_the_others(client, recording, tmp_path, capsys):
    other = tmp_path / "other.wav"
    other.write_bytes(TONE)
    missing = tmp_path / "missing.wav"
    folder = tmp_path / "out"
    (folder / "other.txt").mkdir(parents=True)
    names = [str(missing), str(recording), str(other)]
    assert main(["transcribe", "tiny", *names, "--output-dir", str(folder)]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{folder / 'talk.txt'}\n"
    first, second = printed.err.splitlines()
    assert first == f"error: {missing}: there is no such file"
    assert second.startswith(f"error: {other}: can't write {folder / 'other.txt'}")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "AUDIO: is missing"),
        (["/nowhere.wav"], "/nowhere.wav: there is no such file"),
        (["A", "--beam-size", "0"], "--beam-size: 0 is out of range"),
        (["A", "--temperature", "-1"], "--temperature: -1.0 is out of range"),
        (["A", "--format", "srt", "--no-timestamps"], "--no-timestamps: srt needs timestamps"),
        (["A", "A", "--format", "vtt"], "--format: vtt is for one recording"),
        (["A", "--output-dir", "/dev/null/x"], "--output-dir: can't create the folder /dev/null/x"),
        (["A", "A", "--output-dir", "."], "--output-dir: two recordings would be written to talk.txt"),
        (["A", "--no-timestamps", "--condition-on-previous-text"], "--condition-on-previous-text: without timestamps"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(client, recording, capsys, arguments, problem):
    arguments = [str(recording) if argument == "A" else argument for argument in arguments]
    assert main(["transcribe", "tiny", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {problem}")
    assert not client.added


def test_a_bar_shows_seconds_on_a_terminal(client, recording, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    LLM("tiny").transcribe([recording, TONE])
    assert "1/1 s" in terminal.getvalue() or "2/2 s" in terminal.getvalue()


# ---- words ----


class TestWords:
    @pytest.fixture
    def source(self, tmp_path):
        return aligned_source(tmp_path)

    def test_words_are_read_by_a_request_of_their_own_over_the_finished_text(self, llm, client):
        found = llm.transcribe(TONE, word_timestamps=True)
        assert [word.word for word in found.words] == [" Hello."]
        assert 0 <= found.words[0].start <= found.words[0].end <= 1
        asked = client.added[-1]
        assert (asked.params.layers, asked.params.cross_heads) == ([0, 1], [1, 0])
        assert asked.prompt_token_ids[:3] == [START, ENGLISH, TRANSCRIBE]
        assert asked.encoder_input.content_hash == client.windows[0].encoder_input.content_hash

    def test_the_command_writes_words_into_verbose_json(self, llm, client, tmp_path, capsys):
        path = tmp_path / "a.wav"
        path.write_bytes(TONE)
        assert main(["transcribe", "tiny", str(path), "--word-timestamps", "--format", "verbose_json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [word["word"] for word in told["words"]] == ["Hello."]
        assert set(told["words"][0]) == {"word", "start", "end"}
        assert main(["transcribe", "tiny", str(path), "--format", "verbose_json"]) == 0
        assert "words" not in json.loads(capsys.readouterr().out)

    @pytest.mark.parametrize("format", ["text", "json", "srt", "vtt"])
    def test_formats_without_words_are_refused(self, client, tmp_path, capsys, format):
        path = tmp_path / "a.wav"
        path.write_bytes(TONE)
        assert main(["transcribe", "tiny", str(path), "--word-timestamps", "--format", format]) == 2
        expected = f"error: --word-timestamps: {format} has no place for them; --format verbose_json"
        assert expected in capsys.readouterr().err
        assert not client.added
