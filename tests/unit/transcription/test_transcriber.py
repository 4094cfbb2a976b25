"""Recordings of any length to text, over an engine that plays a script."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from unittest import mock

import numpy as np
import pytest

from ratoon.core.errors import EngineError, RequestError
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.models.log_mel import Spectrogram
from ratoon.transcription import transcriber as module
from ratoon.transcription.options import TranscriptionOptions
from ratoon.transcription.transcriber import Transcriber
from tests.unit.engine.fakes_async import on_event_loop
from tests.unit.transcription.speech import (
    ENGLISH,
    FIRST_TIMESTAMP,
    GERMAN,
    NO_TIMESTAMPS,
    NUM_MEL_BINS,
    PREVIOUS,
    RATE,
    START,
    TRANSCRIBE,
    TRANSLATE,
    FakeEngine,
    Say,
    aligned_vocabulary,
    english_vocabulary,
    needs_av,
    tokens_of,
    tone,
    vocabulary,
    wav,
)

PROMPT = [START, ENGLISH, TRANSCRIBE]


def numbered(seconds: float) -> Spectrogram:
    """A recording in which every feature is the second that it belongs to."""
    num_samples = round(seconds * RATE)
    times = np.arange(max(num_samples // 160, 3000), dtype=np.float32) / 100
    return Spectrogram(np.repeat(times[:, None], NUM_MEL_BINS, axis=1), num_samples)


async def transcribe(engine: FakeEngine, seconds: float, words=vocabulary, **options):
    with mock.patch.object(module, "read_recording", mock.AsyncMock(return_value=numbered(seconds))):
        transcriber = Transcriber(engine, words(), NUM_MEL_BINS)
        return await transcriber.transcribe(b"", TranscriptionOptions(**options))


def told(transcription) -> list[tuple[float, float, str]]:
    return [(round(one.start, 2), round(one.end, 2), one.text) for one in transcription.segments]


# ---- one window ----


@on_event_loop
async def test_a_short_recording_is_one_window():
    engine = FakeEngine(["<0.00> Hello there.<1.50><1.60> And you.<3.00>"])
    found = await transcribe(engine, 4.0, language="en")
    assert found.text == "Hello there. And you."
    assert told(found) == [(0, 1.5, " Hello there."), (1.6, 3, " And you.")]
    assert (found.language, found.duration, found.task) == ("en", 4.0, "transcribe")
    (asked,) = engine.windows
    assert asked.prompt == PROMPT
    assert asked.features.shape == (80, 3000)
    assert asked.params.timestamps == vocabulary().timestamp_rules
    assert (asked.params.temperature, asked.params.max_tokens) == (0.0, 224)
    assert found.segments[0].tokens == tokens_of("<0.00> Hello there.<1.50>")


@on_event_loop
async def test_the_figures_of_a_segment_are_those_of_its_window():
    engine = FakeEngine([Say("<0.00> aaaaaaaaaa<2.00>", logprob=-0.5)], no_speech_prob=0.125)
    (segment,) = (await transcribe(engine, 2.0, language="en")).segments
    assert segment.no_speech_prob == pytest.approx(0.125)
    assert segment.avg_logprob == pytest.approx(-0.5 * 13 / 14), "14 tokens with the end; the first had no choice"
    assert segment.compression_ratio == pytest.approx(10 / 11)
    assert (segment.temperature, segment.seek) == (0.0, 0)


@on_event_loop
async def test_language_is_found_out_from_the_first_window():
    engine = FakeEngine(["<0.00> Hallo<2.00>"], language=GERMAN)
    found = await transcribe(engine, 2.0)
    assert (found.language, found.language_probability) == ("de", pytest.approx(0.75))
    about_language = [one for one in engine.asked if one.is_about_language]
    assert [one.prompt for one in about_language] == [[START]]
    assert about_language[0].params.suppressed_token_ids == []
    assert engine.windows[0].prompt == [START, GERMAN, TRANSCRIBE]


@on_event_loop
async def test_a_language_that_is_given_is_not_found_out():
    engine = FakeEngine(["<0.00> Hallo<2.00>"])
    found = await transcribe(engine, 2.0, language="German", task="translate")
    assert (found.language, found.language_probability, found.task) == ("de", None, "translate")
    assert engine.windows[0].prompt == [START, GERMAN, TRANSLATE]
    assert not any(one.is_about_language for one in engine.asked)


@on_event_loop
async def test_a_model_that_knows_only_english_is_not_asked_for_languages():
    engine = FakeEngine(["<0.00> Hello<2.00>"])
    found = await transcribe(engine, 2.0, english_vocabulary)
    assert (found.language, engine.windows[0].prompt) == ("en", [START])
    assert not any(one.is_about_language for one in engine.asked)
    with pytest.raises(RequestError, match="language"):
        await transcribe(FakeEngine([]), 2.0, english_vocabulary, language="de")
    with pytest.raises(RequestError, match="task"):
        await transcribe(FakeEngine([]), 2.0, english_vocabulary, task="translate")


@on_event_loop
async def test_a_prompt_stands_before_every_window():
    engine = FakeEngine(["<0.00> a<9.00>", "<0.00> b<9.00>"])
    await transcribe(engine, 40.0, language="en", prompt="Ratoon")
    assert [one.prompt for one in engine.windows] == [[PREVIOUS, *b" Ratoon", *PROMPT]] * 2


@on_event_loop
async def test_beams_are_for_the_temperature_zero():
    engine = FakeEngine([Say("<0.00> bad<2.00>", logprob=-3), Say("<0.00> good<2.00>")])
    found = await transcribe(engine, 2.0, language="en", beam_size=5)
    first, second = (one.params for one in engine.windows)
    assert isinstance(first, BeamSearchParams)
    assert (first.beam_width, first.timestamps) == (5, vocabulary().timestamp_rules)
    assert isinstance(second, SamplingParams)
    assert found.text == "good"


# ---- texts that are no good ----


@on_event_loop
async def test_an_improbable_text_is_tried_again_with_the_next_temperature():
    engine = FakeEngine([Say("<0.00> um<2.00>", logprob=-1.5)] * 2 + [Say("<0.00> fine<2.00>", logprob=-0.9)])
    found = await transcribe(engine, 2.0, language="en")
    assert (found.text, found.segments[0].temperature) == ("fine", 0.4)
    assert [one.params.temperature for one in engine.windows] == [0.0, 0.2, 0.4]
    assert all(one.start == 0 for one in engine.windows)


@on_event_loop
async def test_a_text_that_repeats_itself_is_tried_again():
    engine = FakeEngine(["<0.00>" + " and so on" * 20 + "<2.00>", "<0.00> and so forth<2.00>"])
    found = await transcribe(engine, 2.0, language="en")
    assert (found.text, found.segments[0].temperature) == ("and so forth", 0.2)


@on_event_loop
async def test_the_last_temperature_has_the_last_word():
    engine = FakeEngine([Say(f"<0.00> {number}<2.00>", logprob=-2) for number in range(6)])
    found = await transcribe(engine, 2.0, language="en")
    assert (found.text, found.segments[0].temperature) == ("5", 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": (0.3,)},
        {"logprob_threshold": None, "compression_ratio_threshold": None},
        {"logprob_threshold": -9, "compression_ratio_threshold": 99.0},
    ],
)
@on_event_loop
async def test_nothing_is_tried_again_where_that_is_not_wanted(options):
    engine = FakeEngine([Say("<0.00>" + " x" * 100 + "<2.00>", logprob=-2)])
    await transcribe(engine, 2.0, language="en", **options)
    assert len(engine.windows) == 1


@on_event_loop
async def test_silence_is_left_out_and_not_tried_again():
    engine = FakeEngine([Say("<0.00> Thank you<2.00>", logprob=-1.5), "<0.00> Speech<5.00>"], no_speech_prob=0.9)
    found = await transcribe(engine, 40.0, language="en")
    assert told(found) == [(30, 35, " Speech")], "what the model is sure of is no silence"
    assert [one.start for one in engine.windows] == [0, 30]


@on_event_loop
async def test_silence_is_not_asked_for_where_that_is_not_wanted():
    engine = FakeEngine([Say("<0.00> Thank you<2.00>")], no_speech_prob=0.9)
    found = await transcribe(engine, 2.0, language="en", no_speech_threshold=None)
    assert found.segments[0].no_speech_prob is None
    assert len(engine.asked) == 1


# ---- long recordings ----


@on_event_loop
async def test_a_window_begins_where_the_last_segment_ended():
    engine = FakeEngine(
        [
            "<0.00> one<10.00><10.00> two<24.50><24.50> thr",  # the third breaks off
            "<0.00> three<8.00><8.00> four<29.98><29.98>",
            "<0.00> five<3.00>",
        ]
    )
    found = await transcribe(engine, 60.0, language="en")
    assert told(found) == [
        (0, 10, " one"),
        (10, 24.5, " two"),
        (24.5, 32.5, " three"),
        (32.5, 54.48, " four"),
        (54.48, 57.48, " five"),
    ]
    assert [round(one.start, 2) for one in engine.windows] == [0, 24.5, 54.48]
    assert found.text == "one two three four five"
    assert [segment.seek for segment in found.segments] == [0, 0, 2450, 2450, 5448]
    last = engine.windows[-1].features
    assert last[0, 551] == pytest.approx(59.99)
    assert not last[:, 552:].any()


@on_event_loop
async def test_times_behind_the_end_of_the_recording_are_cut_off():
    engine = FakeEngine(["<0.00> one<2.00><2.00> two<7.00><7.00> thanks for watching<9.00>"])
    assert told(await transcribe(engine, 5.0, language="en")) == [(0, 2, " one"), (2, 5, " two")]


@on_event_loop
async def test_segments_that_say_nothing_are_left_out():
    engine = FakeEngine(["<0.00> <2.00><2.00> two<2.00><2.00> three<3.00>"])
    assert told(await transcribe(engine, 4.0, language="en")) == [(2, 3, " three")]


@on_event_loop
async def test_a_window_may_know_what_the_one_before_said():
    texts = ["<0.00> one<10.00><10.00>", "<0.00> two<20.00><20.00>", "<0.00> three<9.00>"]
    engine = FakeEngine(texts)
    await transcribe(engine, 40.0, language="en", prompt="Names", condition_on_previous_text=True)
    said = [tokens_of("<0.00> one<10.00>"), tokens_of("<0.00> two<20.00>")]
    names = list(b" Names")
    assert [one.prompt for one in engine.windows] == [
        [PREVIOUS, *names, *PROMPT],
        [PREVIOUS, *names, *said[0], *PROMPT],
        [PREVIOUS, *names, *said[0], *said[1], *PROMPT],
    ]
    engine = FakeEngine(texts)
    await transcribe(engine, 40.0, language="en")
    assert [one.prompt for one in engine.windows] == [PROMPT] * 3


@on_event_loop
async def test_a_text_that_took_a_high_temperature_tells_the_next_window_nothing():
    poor = [Say("<0.00> hm<30.00><30.00>", logprob=-2)] * 3 + [Say("<0.00> hm<30.00><30.00>")]
    engine = FakeEngine([*poor, "<0.00> two<9.00>"])
    await transcribe(engine, 40.0, language="en", condition_on_previous_text=True)
    assert engine.windows[3].params.temperature == 0.6
    assert engine.windows[-1].prompt == PROMPT


@on_event_loop
async def test_the_silence_request_of_a_window_knows_what_came_before():
    engine = FakeEngine(["<0.00> one<30.00><30.00>", "<0.00> two<9.00>"])
    await transcribe(engine, 40.0, language="en", condition_on_previous_text=True)
    about_silence = [one.prompt for one in engine.asked if one.is_about_silence]
    assert about_silence == [[START], [PREVIOUS, *tokens_of("<0.00> one<30.00>"), START]]


@pytest.mark.slow
@on_event_loop
async def test_hours_are_read_window_by_window():
    engine = FakeEngine(lambda asked: f"<0.00> {asked.start:.0f}<29.00>")
    found = await transcribe(engine, 3 * 3600.0, language="en")
    assert len(engine.windows) == 360
    assert engine.most_running <= 2, "one after the other, each with the question for silence"
    assert told(found)[-1] == (10770, 10799, " 10770")


# ---- without timestamps ----


@on_event_loop
async def test_without_timestamps_windows_are_read_together_and_in_order():
    engine = FakeEngine(lambda asked: f" at {asked.start:.0f}")
    found = await transcribe(engine, 70.0, language="en", timestamps=False, no_speech_threshold=None)
    assert told(found) == [(0, 30, " at 0"), (30, 60, " at 30"), (60, 70, " at 60")]
    assert found.text == "at 0 at 30 at 60"
    assert engine.most_running == 3
    assert [one.prompt for one in engine.windows] == [[*PROMPT, NO_TIMESTAMPS]] * 3
    assert all(one.params.timestamps is None for one in engine.windows)


@on_event_loop
async def test_only_so_many_windows_of_a_recording_are_in_the_engine():
    engine = FakeEngine(lambda asked: " x")
    await transcribe(engine, 3600.0, language="en", timestamps=False, no_speech_threshold=None)
    assert len(engine.windows) == 120
    assert engine.most_running == module.MAX_WINDOWS


@on_event_loop
async def test_a_window_that_fails_takes_the_others_back():
    def fail(asked):
        if asked.start == 30:
            raise EngineError("out of order")
        return " x"

    engine = FakeEngine(fail)
    with pytest.raises(EngineError, match="out of order"):
        await transcribe(engine, 3600.0, language="en", timestamps=False)
    assert engine.running == 0


# ---- all of it ----


@on_event_loop
async def test_news_come_after_decoding_and_after_each_window():
    engine = FakeEngine(["<0.00> one<20.00><20.00>", "<0.00> two<9.00>"])
    with mock.patch.object(module, "read_recording", mock.AsyncMock(return_value=numbered(40.0))):
        follow = Transcriber(engine, vocabulary(), NUM_MEL_BINS).follow(b"", TranscriptionOptions(language="en"))
        seen = [
            (news.seconds_done, [segment.text for segment in news.segments], news.transcription.text)
            async for news in follow
        ]
    assert seen == [(0, [], ""), (20, [" one"], "one"), (40, [" two"], "one two")]


@on_event_loop
async def test_what_nobody_follows_any_more_is_taken_back():
    engine = FakeEngine(lambda asked: "<0.00> x<30.00>")
    with mock.patch.object(module, "read_recording", mock.AsyncMock(return_value=numbered(400.0))):
        for timestamps in (True, False):
            transcriber = Transcriber(engine, vocabulary(), NUM_MEL_BINS)
            options = TranscriptionOptions(language="en", timestamps=timestamps)
            async with aclosing(transcriber.follow(b"", options)) as news:
                async for progress in news:
                    if progress.segments:
                        break
            assert engine.running == 0
        task = asyncio.create_task(transcriber.transcribe(b"", TranscriptionOptions()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.running == 0


@needs_av
@on_event_loop
async def test_a_recording_is_decoded_and_heard():
    engine = FakeEngine(["<0.00> beep<1.00>"])
    transcriber = Transcriber(engine, vocabulary(), NUM_MEL_BINS)
    found = await transcriber.transcribe(wav(tone(1, 8000, 2), 8000), TranscriptionOptions(language="en"))
    assert (found.text, found.duration) == ("beep", pytest.approx(1.0, abs=0.01))
    features = engine.windows[0].features
    loudest = features[:, 10:90].mean(axis=1).argmax()
    assert 8 <= loudest <= 14, "440 Hz"
    with pytest.raises(RequestError, match="file: is empty"):
        await transcriber.transcribe(b"", TranscriptionOptions())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("language", "xx"),
        ("language", 5),
        ("task", "summarize"),
        ("prompt", 5),
        ("prompt", "<|endoftext|>"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", ()),
        ("temperature", (0, "1")),
        ("temperature", True),
        ("beam_size", 0),
        ("beam_size", 2.5),
        ("logprob_threshold", "low"),
    ],
)
@on_event_loop
async def test_options_without_meaning_are_named(field, value):
    with pytest.raises(RequestError) as caught:
        await transcribe(FakeEngine([]), 2.0, **{field: value})
    assert caught.value.field == field


@on_event_loop
async def test_windows_that_are_read_together_know_nothing_of_each_other():
    with pytest.raises(RequestError, match="condition_on_previous_text: without timestamps"):
        await transcribe(FakeEngine([]), 2.0, timestamps=False, condition_on_previous_text=True)


def test_timestamps_of_the_script_are_those_of_the_vocabulary():
    assert tokens_of("a<0.02>") == [97, FIRST_TIMESTAMP + 1]


# ---- words ----


@on_event_loop
async def test_words_of_two_windows_have_times_in_the_recording():
    engine = FakeEngine(["<0.00> Hi you<1.00><1.00> yes<30.00><30.00>", "<0.00> End.<3.00>"])
    found = await transcribe(engine, 40.0, aligned_vocabulary, language="en", word_timestamps=True)
    words = [[(round(word.start, 2), round(word.end, 2), word.word) for word in one.words] for one in found.segments]
    # A token is a byte here, and a tenth of a second.
    assert words[0] == [(0.0, 0.3, " Hi"), (0.3, 0.7, " you")]
    assert words[1] == [(1.0, 1.3, " yes")]
    assert words[2] == [(30.0, 30.5, " End.")]
    assert found.words == [word for one in found.segments for word in one.words]
    (tokens, params), (later, _) = engine.weighed
    assert tokens == [*PROMPT, *tokens_of("<0.00> Hi you<1.00><1.00> yes<30.00><30.00>")]
    assert later == [*PROMPT, *tokens_of("<0.00> End.<3.00>")]
    assert params.positions == [[len(PROMPT), None]] and params.cross_heads == [[0, 1], [1, 0]]


@on_event_loop
async def test_without_timestamps_the_first_word_may_end_later_than_at_once():
    engine = FakeEngine(["Hi you"])
    found = await transcribe(engine, 5.0, aligned_vocabulary, language="en", word_timestamps=True, timestamps=False)
    words = [(round(word.start, 2), round(word.end, 2), word.word) for word in found.words]
    assert words == [(0.0, 0.2, "Hi"), (0.2, 0.6, " you")]
    ((tokens, params),) = engine.weighed
    assert params.positions == [[len(PROMPT), None]] and tokens[len(PROMPT)] == NO_TIMESTAMPS


@on_event_loop
async def test_words_are_found_once_for_the_text_that_is_kept_and_not_for_silence():
    engine = FakeEngine([Say("<0.00> bad<1.00>", logprob=-3), Say("<0.00> good<1.00>")])
    found = await transcribe(engine, 2.0, aligned_vocabulary, language="en", word_timestamps=True)
    assert [word.word for word in found.words] == [" good"]
    assert len(engine.weighed) == 1
    silent = FakeEngine([Say("<0.00> bad<1.00>", logprob=-3)], no_speech_prob=0.9)
    found = await transcribe(silent, 2.0, aligned_vocabulary, language="en", word_timestamps=True)
    assert found.words == [] and not silent.weighed
    plain = FakeEngine(["<0.00> a<1.00>"])
    found = await transcribe(plain, 2.0, aligned_vocabulary, language="en")
    assert found.words is None and found.segments[0].words is None and not plain.weighed


@on_event_loop
async def test_words_of_a_model_without_alignment_heads_are_refused():
    with pytest.raises(RequestError, match=r"word_timestamps: the model's generation_config\.json names no alignment"):
        await transcribe(FakeEngine([]), 2.0, word_timestamps=True)
    with pytest.raises(RequestError, match="word_timestamps: 'yes' is neither true nor false"):
        await transcribe(FakeEngine([]), 2.0, word_timestamps="yes")
