"""`ratoon bench two-stage`: what it refuses, and what it makes of rounds that agree or do not."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from ratoon.benchmarks import bench_two_stage
from ratoon.benchmarks.two_stage.experiment import Round, Turn
from ratoon.benchmarks.two_stage.measures import compare, summarize
from ratoon.benchmarks.two_stage.report import format_agreement, format_notes, format_table
from ratoon.benchmarks.two_stage.settings import check_model, fitting_engine, settings_of
from ratoon.benchmarks.two_stage.ways import WAYS, Beam
from ratoon.cli import main
from ratoon.core.errors import RequestError
from tests.unit.engine.fakes import model_config

TURN = Turn(
    stage1_seconds=2.0,
    ttft_seconds=[0.5],
    stage2_seconds=1.0,
    computed_tokens=[6],
    inherited_tokens=[30],
    sources=["lease"],
    runner_tokens=6,
    answers=[[1, 2, 3]],
    beams=[[Beam((1, 2), -0.5), Beam((1, 3), -0.75)]],
)


def a_round(**changes_by_way: dict) -> Round:
    return {way.key: msgspec.structs.replace(TURN, **changes_by_way.get(way.key, {})) for way in WAYS}


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_two_stage.add_parser(parser.add_subparsers())
    return parser.parse_args(["two-stage", *options])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--stage1-tokens", "0"], "--stage1-tokens"),
        (["--suffix-tokens", "-1"], "--suffix-tokens"),
        (["--beam-width", "0"], "--beam-width"),
        (["--beam-width", "100000"], "--beam-width"),
        (["--beam-tokens", "-3"], "--beam-tokens"),
        (["--rounds", "0"], "--rounds"),
        (["--requests", "0"], "--requests"),
        (["--seed", "-1"], "--seed"),
        (["--no-prefix-caching"], "--no-prefix-caching"),
        (["--json", "/no/such/folder/out.json"], "--json"),
        (["--plot", "picture.bmp"], "--plot"),
    ],
)
def test_bad_options_are_refused_by_name_before_a_model_is_looked_for(options, named, capsys):
    assert main(["bench", "two-stage", "no-such-model", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}: ")


def test_what_the_model_cannot_do_is_refused_by_name():
    model = model_config()
    too_long = settings_of(parse("--prompt-tokens", str(model.max_position)))
    with pytest.raises(RequestError, match=r"^--prompt-tokens: "):
        check_model(too_long, model, None)
    too_wide = settings_of(parse("--beam-width", str(model.vocab_size + 1), "--prompt-tokens", "5"))
    with pytest.raises(RequestError, match=r"^--beam-width: "):
        check_model(too_wide, model, max_model_len=4096)


def test_the_kv_cache_has_room_for_leases_others_and_beams_unless_it_was_chosen():
    model = model_config()
    fitting = fitting_engine(settings_of(parse("--requests", "2")), model, parse())
    parents = 2 * -(-705 // 16)
    assert fitting["num_blocks"] > 2 * parents + 2 * 32
    assert "num_blocks" not in fitting_engine(settings_of(parse()), model, parse("--kv-memory", "1GiB"))
    small_share = fitting_engine(settings_of(parse()), model, parse("--lease-fraction", "0.1"))
    assert 0.1 * small_share["num_blocks"] > parents / 2
    assert fitting_engine(settings_of(parse("--beam-width", "600")), model, parse())["max_num_seqs"] == 600


def test_ratios_are_taken_round_by_round():
    fast = {"ttft_seconds": [0.1]}
    rounds = [a_round(continuation=fast), a_round(no_reuse={"ttft_seconds": [2.0]}, continuation=fast)]
    advantage = summarize(rounds)["continuation"].ttft.advantage
    assert (advantage.min, advantage.max) == (pytest.approx(5), pytest.approx(20))


def test_near_ties_may_change_places_and_nothing_else_may_differ():
    ties = [Beam((1, 2), -0.5), Beam((1, 3), -0.500001)]
    swapped = [Beam((1, 3), -0.5), Beam((1, 2), -0.500001)]
    assert compare(
        [a_round(**{way.key: {"beams": [ties]} for way in WAYS[1:]}, no_reuse={"beams": [swapped]})]
    ).all_well
    others = (
        {"beams": [[Beam((1, 2), -0.5), Beam((1, 4), -0.75)]]},  # another token
        {"beams": [[Beam((1, 2), -0.5), Beam((1, 3), -0.76)]]},  # another score
        {"beams": [[Beam((1, 2), -0.5)]]},  # one is missing
        {"answers": [[1, 2, 4]]},
        {"runner_tokens": 7},
    )
    for changes in others:
        agreement = compare([a_round(), a_round(prefix_cache=changes)])
        assert not agreement.all_well
        assert "NOT" in " ".join(format_agreement(agreement))


def test_a_runner_out_of_reach_is_no_disagreement():
    agreement = compare([a_round(**{way.key: {"runner_tokens": None} for way in WAYS})])
    assert agreement.all_well and agreement.counts_agree is None


def test_the_table_shows_the_spread_of_several_rounds_and_a_lost_lease_is_noted():
    rounds = [a_round(), a_round(continuation={"ttft_seconds": [0.05], "sources": ["recomputed"]})]
    table = format_table(summarize(rounds)).splitlines()
    row = next(index for index, line in enumerate(table) if line.startswith("continuation  "))
    assert "275" in table[row] and table[row].endswith("lease, recomputed")
    assert "50.0–500" in table[row + 1]
    assert [note.split(":")[0] for note in format_notes(summarize(rounds))] == ["continuation"]
