"""What encoders make, kept in files: an engine that starts again, or another one of the host, runs no encoder over an
image or a recording that was read before, and answers the same."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from ratoon import LLM
from tests.golden.every_kind import encoder_prompts
from tests.golden.image_readers import IMAGE_FAMILIES, num_encoder_runs
from tests.golden.test_encoder_decoder_api import INPUTS, engine, greedy, tokens_of
from tests.golden.test_images_compose import NUM_INPUTS, ask, expected, seeing
from tests.golden.test_images_compose import tokens_of as tokens_of_one


def media_runner(llm: LLM) -> Any:
    return llm._client.core.executor._worker.runner.media


def outputs_in(folder: Path, llm: LLM) -> list[Path]:
    """The files of encoder outputs."""
    (mover,) = media_runner(llm).store._movers
    return sorted(Path(mover._folder).rglob("*.kv"))


@pytest.mark.parametrize("family", IMAGE_FAMILIES[:2])
def test_a_picture_is_encoded_once_for_all_engines_of_a_folder(family: str, tmp_path: Path) -> None:
    settings = {"kv_files": str(tmp_path), "swap_memory": "1MiB"}
    with seeing(family, **settings) as (llm, reader):
        ask(llm, reader.prompt(0))
        assert num_encoder_runs(llm) == NUM_INPUTS[family]
        media_runner(llm).store.flush()
        files = outputs_in(tmp_path, llm)
        assert len(files) == NUM_INPUTS[family]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        with seeing(family, **settings) as (other, _):  # another engine, while the first one runs
            prompt = reader.prompt(0, "who is in ", "?")  # of which no block is known
            assert tokens_of_one(ask(other, prompt)) == expected(other, reader, prompt)
            assert (num_encoder_runs(other), media_runner(other).store.num_loaded) == (0, NUM_INPUTS[family])
            salted = ask(other, reader.prompt(0, "now ", "?"), cache_salt="another tenant")
            assert salted.error is None and num_encoder_runs(other) == NUM_INPUTS[family], "it has a key of its own"


def test_outputs_that_are_damaged_or_of_other_weights_are_made_again(tmp_path: Path) -> None:
    family, settings = "qwen2_5_vl", {"kv_files": str(tmp_path), "swap_memory": "1MiB"}
    with seeing(family, **settings) as (llm, reader):
        ask(llm, reader.prompt(0))
        media_runner(llm).store.flush()
        (file,) = outputs_in(tmp_path, llm)
    content = bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)
    with seeing(family, **settings) as (llm, reader):
        prompt = reader.prompt(0, "who is in ", "?")
        assert tokens_of_one(ask(llm, prompt)) == expected(llm, reader, prompt)
        assert num_encoder_runs(llm) == 1
        media_runner(llm).store.flush()
        assert file.read_bytes() != content, "it is written again"
    with seeing(family, **settings, kv_cache_dtype="float16") as (llm, reader):  # blocks of another kind, same outputs
        ask(llm, reader.prompt(0))
        assert num_encoder_runs(llm) == 0
    with seeing(family, **(settings | {"dtype": "bfloat16"})) as (llm, reader):
        ask(llm, reader.prompt(0))
        assert num_encoder_runs(llm) == 1


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_what_cross_attention_reads_outlives_the_engine(family: str, tmp_path: Path) -> None:
    """The keys and values that are made of an encoder's output, of texts as of recordings."""
    settings = {"kv_files": str(tmp_path), "swap_memory": "1MiB"}
    prompts = INPUTS if family == "bart" else encoder_prompts(family)
    runs: list[int] = []
    answers = []
    for _ in range(2):
        with engine(family, **settings) as llm:
            answers.append(tokens_of(llm.generate(prompts, greedy(), progress=False)))
            runs.append(llm._client.core.executor._worker.runner.encoder.num_runs)
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) > 1, "a block of another input would be noticed"
    assert runs == [len(prompts), 0]
