"""`ratoon bench two-stage --url`: what each way sends and when, what is made of the answers, what is refused."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from ratoon.api.remote.client import CHAT, RemoteError
from ratoon.benchmarks.loadgen.datasets import Turn as FirstTurn
from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.two_stage.conversations import Conversation, read_conversations
from ratoon.benchmarks.two_stage.http_transport import TwoStageClient
from ratoon.benchmarks.two_stage.measures import all_well, summarize
from ratoon.benchmarks.two_stage.plot import draw
from ratoon.benchmarks.two_stage.report import as_object, format_latencies, format_notes, format_ways
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.trips import (
    CONTINUATION,
    HTTP_WAYS,
    NO_REUSE,
    PREFIX_CACHE,
    Beam,
    Measured,
    Trip,
    Turn,
    shared_beams,
)
from ratoon.cli import main
from ratoon.core.errors import RequestError

URL = ["bench", "two-stage", "--url", "http://127.0.0.1:1"]


def settings(**changes) -> TwoStageSettings:
    sizes = {"prompt_tokens": 3, "stage1_tokens": 2, "suffix_tokens": 1, "beam_width": 2, "beam_tokens": 2}
    return TwoStageSettings(**{**sizes, "rounds": 1, "seed": 0, "num_conversations": 2, "concurrency": None, **changes})


def conversation(number: int = 0, **fields) -> Conversation:
    return Conversation(FirstTurn(output_len=2, prompt=[number, 8, 9]), [7], seed=number, **fields)


class FakeClient:
    """A server that samples 1, 2 and finds the beams 3, 4 and 3, 5."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.ended: list[int] = []  # of conversations, stage 1
        self.slow: asyncio.Event | None = None  # stage 1 of conversation 0 waits for it
        self.fails_stage = 0
        self.usage = {"prompt_tokens": 6, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}

    async def stream_timed(self, path, body, receive, decode) -> float:
        self.paths.append(path)
        self.bodies.append(body)
        stage = 2 if body.get("use_beam_search") else 1
        if stage == self.fails_stage:
            raise RemoteError("server", "broke", kind="broke off")
        if stage == 1 and self.slow is not None and body["prompt"][0] == 0:
            await self.slow.wait()
        for chunk in self.sampled(body) if stage == 1 else self.found():
            receive(time.perf_counter(), [decode(json.dumps({"id": f"cmpl-{len(self.bodies)}", **chunk}).encode())])
            await asyncio.sleep(0)
        return time.perf_counter()

    def sampled(self, body):
        prompt = {"prompt_token_ids": body.get("prompt", [4, 4])}
        chat = {"choices": [{"delta": {"content": "a"}, "token_ids": [1]}], **prompt}
        yield chat if "messages" in body else {"choices": [{"text": "a", "token_ids": [1], **prompt}]}
        yield {"choices": [{"text": "b", "token_ids": [2], "finish_reason": "length"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}

    def found(self):
        yield {"choices": [{"text": "", "finish_reason": None, "best_so_far": "c", "score": -1.0}]}
        for index in range(2):
            choice = {"text": " Paris"[: 6 - index], "token_ids": [3, 4 + index], "score": -1.0 - index}
            yield {"choices": [{"index": index, "finish_reason": "length", **choice}], "continuation": {"source": "x"}}
        yield {"choices": [], "usage": self.usage}


def take_turn(client: FakeClient, way, conversations, **changes) -> Turn:
    runner = TwoStageClient(client, "m", settings(**changes), "run")
    return asyncio.run(runner.take_turn(way, conversations, [0.0] * len(conversations), "0"))


def test_ways_differ_in_what_they_send():
    sent = {}
    for way in HTTP_WAYS:
        client = FakeClient()
        turn = take_turn(client, way, [conversation(), conversation(1)], concurrency=1)
        assert [trip.answer for trip in turn.trips.values()] == [[1, 2], [1, 2]]
        assert turn.trips[0].beams == [Beam((3, 4), -1.0), Beam((3, 5), -2.0)]
        assert turn.trips[0].texts == [" Paris", " Pari"]
        sent[way] = client.bodies
    for way, bodies in sent.items():
        salts = [body["cache_salt"] for body in bodies]
        assert len(set(salts)) == (4 if way is NO_REUSE else 1)
        assert [body["max_tokens"] for body in bodies] == [2, 2, 2, 2]
        assert all(body["n"] == body["beam_width"] == 2 for body in bodies[1::2])
    assert [body["prompt"] for body in sent[PREFIX_CACHE]] == [
        [0, 8, 9],
        [0, 8, 9, 1, 2, 7],
        [1, 8, 9],
        [1, 8, 9, 1, 2, 7],
    ]
    first, second, *_ = sent[CONTINUATION]
    assert first["retain_kv"] > 0 and "retain_kv" not in sent[PREFIX_CACHE][0]
    assert (second["prompt"], second["continuation_of"], second["continuation_suffix"]) == ("", "cmpl-1", [7])


def test_a_second_stage_follows_its_first_and_waits_for_no_other():
    client = FakeClient()

    async def run():
        client.slow = asyncio.Event()
        runner = TwoStageClient(client, "m", settings(), "run")
        turn = asyncio.create_task(runner.take_turn(PREFIX_CACHE, [conversation(), conversation(1)], [0.0, 0.0], "0"))
        while len(client.bodies) < 3:
            await asyncio.sleep(0)
        assert client.bodies[2]["prompt"] == [1, 8, 9, 1, 2, 7]  # of the one that ended, while the other runs
        client.slow.set()
        return await turn

    turn = asyncio.run(run())
    assert [trip.succeeded for trip in turn.trips.values()] == [True, True]
    stage2 = turn.trips[1].stage2
    assert stage2.ttft is not None and stage2.ttft <= stage2.e2e and stage2.chunk_tokens[0] == 0
    assert turn.trips[1].seconds >= stage2.e2e


def test_messages_go_to_the_chat_and_their_answer_is_searched_behind_as_a_completion():
    client = FakeClient()
    turn = FirstTurn(output_len=2, messages=[{"role": "user", "content": "hi"}])
    take_turn(client, PREFIX_CACHE, [Conversation(turn, [7], 0)])
    assert client.paths == [CHAT, "/v1/completions"]
    assert client.bodies[1]["prompt"] == [4, 4, 1, 2, 7]


def test_what_fails_is_written_down_and_has_no_second_stage():
    for stage in (1, 2):
        client = FakeClient()
        client.fails_stage = stage
        (trip,) = take_turn(client, CONTINUATION, [conversation()]).trips.values()
        assert not trip.succeeded and trip.seconds is None and (trip.stage2 is None) == (stage == 1)
        measured = Measured([[conversation()]], [{"continuation": Turn({0: trip}, 1.0)}])
        summaries = summarize(measured)
        assert not all_well(summaries.values())
        (note,) = format_notes(measured, summaries)
        assert "1 requests failed" in note and "broke" in note


def test_a_server_that_ignores_what_is_asked_for_is_found_out():
    client = FakeClient()
    client.sampled = lambda body: [{"choices": [{"text": "a", "finish_reason": "stop"}]}]
    (trip,) = take_turn(client, CONTINUATION, [conversation()]).trips.values()
    assert "return_token_ids" in trip.stage1.error and not trip.succeeded


def trip(beams, texts, answer=(1, 2), cached=0, source="lease", ttft=1.0) -> Trip:
    first = RequestRecord(0, 0, 0.0, 0.0, 2.0, [1.0, 2.0], [1, 1], 10, 0, 2)
    second = RequestRecord(0, 1, 2.0, 2.0, 4.0, [2.0 + ttft], [4], 12, cached, 4)
    return Trip(first, second, list(answer), beams, texts, source)


def measured_rounds() -> Measured:
    beams = [Beam((3, 4), -1.0), Beam((3, 5), -2.0)]
    other = [Beam((3, 4), -1.0), Beam((3, 6), -2.0)]
    reference = conversation(references=["Paris"])
    turns = {
        "no_reuse": Turn({0: trip(beams, [" London", " Paris."], source="recomputed")}, 4.0),
        "prefix_cache": Turn({0: trip(beams, [" London", " Paris."], cached=8, source="prefix_cache", ttft=0.5)}, 4.0),
        "continuation": Turn({0: trip(other, [" Paris", " Rome"], (1, 3), cached=10, ttft=0.1)}, 2.0),
    }
    return Measured([[reference]], [turns])


def test_figures_and_evaluation():
    summaries = summarize(measured_rounds())
    none, cache, continued = (summaries[way.key] for way in HTTP_WAYS)
    assert (none.cached_tokens, none.computed_tokens) == (0, 12)
    assert (continued.cached_tokens, continued.computed_tokens) == (10, 2)
    assert (cache.evaluation.same_answers, cache.evaluation.same_beams) == (1.0, 1.0)
    assert (continued.evaluation.same_answers, continued.evaluation.same_beams) == (0.0, 0.5)
    assert [(one.evaluation.hits, one.evaluation.hits_at_1) for one in (cache, continued)] == [(1.0, 0.0), (1.0, 1.0)]
    assert (none.ttft_advantage, cache.ttft_advantage) == (1.0, 2.0)
    assert (none.conversations_per_second, continued.conversations_per_second) == (0.25, 0.5)
    assert continued.both_ms.median == 4000 and continued.stage1.ttft_ms.median == 1000
    assert not all_well(summaries.values()) and all_well([none, cache])


def test_reports_show_every_way_and_programs_get_everything(tmp_path):
    measured = measured_rounds()
    summaries = summarize(measured)
    latencies, ways = format_latencies(summaries), format_ways(summaries)
    assert latencies.count("stage 2") == 3 and "4,000" in latencies
    assert "10.0×" in ways and "50.0%" in ways and "hits at 1" in ways
    told = json.loads(json.dumps(as_object({"url": "u"}, measured, summaries)))
    assert told["rounds"][0]["continuation"]["conversations"][0]["stage2"]["ttft_ms"] == 100.0
    assert told["ways"]["continuation"]["label"] == "continuation" and told["all_well"] is False
    pytest.importorskip("matplotlib")
    draw(str(tmp_path / "out.svg"), "title", measured, summaries)
    assert "</svg>" in (tmp_path / "out.svg").read_text()


def test_a_runner_that_computes_another_number_of_tokens_is_noted():
    measured = measured_rounds()
    turn = measured.rounds[0]["prefix_cache"]
    for by_runner, agrees in ((None, None), (4, True), (5, False)):
        turn.runner_tokens = by_runner
        summaries = summarize(measured)
        assert summaries["prefix_cache"].runner_agrees is agrees
        assert all_well([summaries["prefix_cache"]]) == (agrees is not False)
        assert any("model runner" in note for note in format_notes(measured, summaries)) == (agrees is False)


def test_hits_are_left_out_without_references_and_lost_leases_are_noted():
    measured = measured_rounds()
    measured.conversations = [[conversation()]]
    measured.rounds[0]["continuation"].trips[0].source = "prefix_cache"
    summaries = summarize(measured)
    assert "hits" not in format_ways(summaries)
    assert "lease" in format_notes(measured, summaries)[0]


def test_shared_beams_have_the_same_tokens_and_scores():
    wanted = [Beam((1,), -1.0), Beam((2,), -2.0)]
    assert shared_beams([Beam((2,), -2.0), Beam((1,), -1.00001)], wanted) == 1.0
    assert shared_beams([Beam((1,), -1.5), Beam((2,), -2.0)], wanted) == 0.5
    assert shared_beams([], wanted) == 0.0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"suffix": "x"}', "needs either a prompt or messages"),
        ('{"prompt": "a", "suffix": 5}', "suffix"),
        ('{"prompt": "a", "reference": " "}', "empty reference"),
        ('{"prompt": "a", "reference": [1]}', "reference"),
        ('{"prompt": "a", "output_len": 0}', "output_len"),
        ("nonsense", "line 1"),
        ("", "holds no requests"),
    ],
)
def test_a_file_with_another_form_is_refused_by_its_line(tmp_path, line, problem):
    file = tmp_path / "work.jsonl"
    file.write_text(line)
    with pytest.raises(RequestError, match=problem):
        read_conversations(str(file), 4)


def test_a_file_has_prompts_suffixes_and_references(tmp_path):
    file = tmp_path / "work.jsonl"
    file.write_text('{"prompt": [1, 2], "suffix": [3], "reference": "a"}\n{"prompt": "x", "reference": ["b", "c"]}\n')
    first, second = read_conversations(str(file), 4)
    assert (first.turn.prompt, first.suffix, first.references, first.turn.output_len) == ([1, 2], [3], ["a"], 4)
    assert (second.suffix, second.references) == ("", ["b", "c"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([*URL, "smollm2-135m"], "MODEL"),
        ([*URL, "--num-blocks", "9"], "--num-blocks"),
        ([*URL, "--num-conversations", "0"], "--num-conversations"),
        ([*URL, "--request-rate", "0"], "--request-rate"),
        ([*URL, "--timeout", "-1"], "--timeout"),
        ([*URL, "--requests", "0"], "--requests"),
        ([*URL, "--beam-width", "0"], "--beam-width"),
        ([*URL, "--file", "/no/such/file"], "/no/such/file"),
        ([*URL, "--plot", "picture.bmp"], "--plot"),
        ([*URL[:2], "--file", "x"], "--file"),
        ([*URL[:2], "--request-rate", "2"], "--request-rate"),
        ([*URL[:2], "--model", "x"], "--model"),
    ],
)
def test_bad_options_are_refused_by_name_before_anything_is_sent(options, named, capsys):
    assert main(options) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}")


def test_a_server_that_is_not_there_is_named(capsys):
    assert main(URL) == 1
    assert "127.0.0.1:1: can't be reached" in capsys.readouterr().err
