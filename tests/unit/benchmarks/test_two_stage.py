"""`ratoon bench two-stage` in one process: what it refuses, and the size of its KV cache."""

from __future__ import annotations

import argparse

import pytest

from ratoon.benchmarks import bench_two_stage
from ratoon.benchmarks.two_stage.settings import check_model, fitting_engine, settings_of
from ratoon.cli import main
from ratoon.core.errors import RequestError
from tests.unit.engine.fakes import model_config


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
