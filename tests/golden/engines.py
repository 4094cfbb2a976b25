"""Real engines over small random models, and what transformers answers with the same weights.

The engine is the one that users get: `LLM`, built from a folder that transformers saved. Oracle answers are computed
once for each prompt and kept.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from ratoon.api.llm import LLM
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import SamplingParams
from ratoon.scheduling.scheduler import Scheduler
from tests.depths import depth_settings
from tests.golden.test_model_logits import FAMILIES
from tests.golden.tiny_latent_models import LATENT_MODELS
from tests.golden.tiny_mixtures import MIXTURES
from tests.golden.tiny_models import VOCAB_SIZE, TinyModel, tiny_gemma3, tiny_mistral, tiny_qwen3
from tests.golden.tiny_states import STATE_MODELS

NUM_BLOCKS = 96  # enough for every batch of these tests, unless a test wants less

# Those whose logits are compared without an engine, and shapes that matter only to one.
ENGINE_FAMILIES: dict[str, Callable[[], TinyModel]] = {
    **FAMILIES,
    "mistral with a window wider than a block": lambda: tiny_mistral(window=20),
    "gemma3 with a window wider than a block": lambda: tiny_gemma3(window=20),
    "qwen3 untied with heads that the native kernels take": lambda: tiny_qwen3(tied=False, head_dim=32),
}


@functools.cache
def tiny_model(family: str) -> TinyModel:
    tiny = {**ENGINE_FAMILIES, **MIXTURES, **LATENT_MODELS, **STATE_MODELS}[family]()
    tiny.oracle.generation_config.eos_token_id = None  # the engine gets ignore_eos
    return tiny


@functools.cache
def _saved_models() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ratoon-golden-")  # removed when the process ends


@functools.cache
def model_folder(family: str) -> Path:
    """The model as transformers saves it, and a tokenizer for it."""
    folder = Path(_saved_models().name) / family.replace(" ", "-").replace("/", "-")
    tiny_model(family).oracle.save_pretrained(folder)
    write_word_tokenizer(folder)
    return folder


def write_word_tokenizer(folder: Path) -> None:
    """Token n is the word "w<n>"."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@contextmanager
def engine(family: str, **settings: Any) -> Iterator[LLM]:
    """An engine that is checked afterwards: whatever was done with it, no block may be left over."""
    with engine_of_folder(model_folder(family), **settings) as llm:
        yield llm


@contextmanager
def engine_of_folder(folder: Path, **settings: Any) -> Iterator[LLM]:
    defaults = {"device": "cpu", "num_blocks": NUM_BLOCKS, "num_threads": 1, "skip_tokenizer": True, "max_num_seqs": 32}
    with LLM(str(folder), **(defaults | depth_settings() | settings)) as llm:
        yield llm
        check_nothing_left(llm)


def scheduler_of(llm: LLM) -> Scheduler:
    return llm._client.core.scheduler


def check_nothing_left(llm: LLM) -> None:
    """No request, no block and, after the next plan, no row is left."""
    scheduler = scheduler_of(llm)
    scheduler.check()
    assert not llm.engine.has_unfinished_requests()
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_usable_blocks
    while llm._client.has_work():
        llm.engine.step()
    worker = getattr(llm._client.core.executor, "_worker", None)  # None: it is in another process
    assert worker is None or len(worker.runner.input_batch) == 0


@functools.cache
def _oracle_tokens(family: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    oracle = tiny_model(family).oracle
    with torch.inference_mode():
        generated = oracle.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=count, pad_token_id=0,
        )  # fmt: skip
    return tuple(generated[0, len(prompt) :].tolist())


def oracle_tokens(family: str, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by transformers, from this prompt alone."""
    return list(_oracle_tokens(family, tuple(prompt), count))


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **changes)


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    outputs = llm.generate([list(prompt) for prompt in prompts], params, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The first choice of each."""
    return [list(output.outputs[0].token_ids) for output in outputs]
