"""Engine cores over small random models with an encoder, driven step by step, and what transformers says to the same.

The weights are made livelier than they come: as they are, these models repeat one token whatever their encoder reads,
and a mistake in cross-attention would not change a text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin, GenerationMode
from transformers.modeling_outputs import BaseModelOutput

from ratoon.core.config import AdapterConfig, CacheConfig, EngineConfig, SchedulerConfig, fit_to_model
from ratoon.core.encoder import EncoderInput, features_for_encoder, tokens_for_encoder
from ratoon.core.outputs import PromptLogprobsChunk
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.core.wire import WireTensor
from ratoon.distributed.uniproc import UniProcExecutor
from ratoon.engine.core import EngineCore
from ratoon.memory.block_pool import BlockPool
from ratoon.observe.startup import StartupTimer
from tests.depths import depth_settings
from tests.golden import tiny_encoder_models as tiny_encoders
from tests.golden.beam_oracle import Text
from tests.golden.driver import GARBAGE
from tests.golden.hidden_oracle import CoreDriver
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE, TinyModel, make_tiny, random_token_ids

Tensor = torch.Tensor

TOLERANCE = 1e-4
NOISE = 2e-5  # tokens whose log-probabilities are closer than this are as good as each other
START = 3  # the decoder start token of all families
NUM_BLOCKS = 160  # enough for every batch of these tests, unless a test wants less
MAX_STEPS = 3000  # that any of them takes

FAMILIES: dict[str, Callable[[], TinyModel]] = {
    "bart": tiny_encoders.tiny_bart,
    "mbart": tiny_encoders.tiny_mbart,
    "marian": tiny_encoders.tiny_marian,
    "t5": tiny_encoders.tiny_t5,
    "t5 with gates and an own head": lambda: tiny_encoders.tiny_t5("gated-gelu", own_head=True),
    "whisper": tiny_encoders.tiny_whisper,
}


def bart_with_other_heads() -> TinyModel:
    """The native kernels take the decoder's heads of 16, and not the encoder's of 24."""
    config = tiny_encoders.tiny_bart().config
    assert config.encoder is not None
    encoder = replace(config.encoder, head_dim=24)
    config = replace(config, hidden_size=48, num_heads=3, num_kv_heads=3, encoder=encoder)
    sizes = tiny_encoders.BART_SIZES | {"d_model": 48, "decoder_attention_heads": 3}
    oracle_config = transformers.BartConfig(
        **sizes, max_position_embeddings=config.max_position, forced_eos_token_id=None
    )
    return make_tiny(transformers.BartForConditionalGeneration, oracle_config, config, seed=0)


# Shapes that matter only to an engine
OTHER_SHAPES = {"bart with other heads": bart_with_other_heads}
TEXT_FAMILIES = [family for family in FAMILIES if family != "whisper"]


# ---- models ----


@functools.cache
def tiny_model(family: str) -> TinyModel:
    tiny = (FAMILIES | OTHER_SHAPES)[family]()
    _make_lively(tiny.oracle)
    settings = tiny.oracle.generation_config
    settings.eos_token_id = settings.forced_bos_token_id = settings.forced_eos_token_id = None
    return tiny


@torch.no_grad()
def _make_lively(oracle: Any) -> None:
    """Sharper attention, less of what is the same everywhere, and a last norm that turns half of the signs, so that a
    token is not most like itself. The engine's weights are the same tensors."""
    # T5's scores, which are not scaled, are sharp enough.
    sharpened = ("q_proj.weight", "k_proj.weight", "embed_positions.weight")
    for name, parameter in oracle.named_parameters():
        if name.endswith(sharpened) and parameter.requires_grad:
            parameter.mul_(3)
        elif name.endswith(".bias"):
            parameter.mul_(0.3)
    weight = _last_norm(oracle.get_decoder()).weight
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)).sign() * 5)


def _last_norm(stack: Any) -> Any:
    for name in ("layer_norm", "final_layer_norm"):
        if getattr(stack, name, None) is not None:
            return getattr(stack, name)
    return stack.layers[-1].final_layer_norm


# ---- what encoders read ----


@dataclass(frozen=True)
class Source:
    """An encoder input by itself: tokens, or the features that belong to a seed."""

    token_ids: tuple[int, ...] = ()
    audio_seed: int | None = None

    def for_engine(self) -> EncoderInput:
        if self.audio_seed is None:
            return tokens_for_encoder(list(self.token_ids))
        features = tiny_encoders.random_features(self.audio_seed).numpy()
        return features_for_encoder(
            WireTensor("float32", features.shape, features.tobytes()), tiny_encoders.NUM_AUDIO_STATES
        )

    def for_oracle(self) -> Tensor:
        if self.audio_seed is None:
            return torch.tensor([self.token_ids])
        return tiny_encoders.random_features(self.audio_seed)[None]

    @property
    def num_positions(self) -> int:
        return len(self.token_ids) if self.audio_seed is None else tiny_encoders.NUM_AUDIO_STATES


def source_of(family: str, length: int, seed: int = 0) -> Source:
    """`length` means nothing to a model that reads audio."""
    if family == "whisper":
        return Source(audio_seed=1000 * seed + length)
    return Source(tuple(random_token_ids(length, seed=1000 * seed + length)))


def decoder_prompt(length: int, seed: int = 0) -> list[int]:
    return [START, *random_token_ids(length - 1, seed=7000 + 100 * seed + length)]


# ---- transformers ----


@functools.cache
@torch.inference_mode()
def encoder_states(family: str, source: Source) -> Tensor:
    states: Tensor = tiny_model(family).oracle.get_encoder()(source.for_oracle()).last_hidden_state
    return states


@functools.cache
@torch.inference_mode()
def _oracle_logprobs(family: str, source: Source, token_ids: tuple[int, ...]) -> Tensor:
    encoded = BaseModelOutput(last_hidden_state=encoder_states(family, source))
    output = tiny_model(family).oracle(
        encoder_outputs=encoded, decoder_input_ids=torch.tensor([token_ids]), use_cache=False
    )
    return output.logits[0].log_softmax(dim=-1)


def oracle_logprobs(family: str, source: Source, token_ids: Sequence[int]) -> Tensor:
    """[T, V]: what transformers expects behind each of these decoder tokens. Not to be written to: it is kept."""
    return _oracle_logprobs(family, source, tuple(token_ids))


def assert_greedy(family: str, source: Source, prompt: Sequence[int], token_ids: Sequence[int], what: Any = "") -> None:
    """Each of these tokens is what transformers would choose behind the prompt and those before it: then they are what
    it generates."""
    assert token_ids, what
    logprobs = oracle_logprobs(family, source, [*prompt, *token_ids[:-1]])[len(prompt) - 1 :]
    best = logprobs.max(dim=-1)
    chosen = logprobs[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    assert bool((best.values - chosen < NOISE).all()), (what, list(token_ids), best.indices.tolist())


def generate(family: str, source: Source, prompt: Sequence[int], **settings: Any) -> Any:
    """The generation of transformers, with all its settings."""
    oracle = tiny_model(family).oracle
    inputs = source.for_oracle()
    name = "input_ids" if source.audio_seed is None else "input_features"
    # Its own cache would have as many layers as T5's encoder.
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.inference_mode():  # of the base class: Whisper's own cuts audio and adds tokens
        return GenerationMixin.generate(
            oracle, **{name: inputs}, decoder_input_ids=torch.tensor([list(prompt)]), do_sample=False, pad_token_id=0,
            past_key_values=cache, return_dict_in_generate=True, output_scores=True, **settings,
        )  # fmt: skip


def oracle_beams(
    family: str, source: Source, prompt: Sequence[int], params: BeamSearchParams, stop_token_ids: list[int] | None
) -> list[Text]:
    with pytest.MonkeyPatch.context() as patch:
        # It would take a width of 1 for a greedy search, which has no scores.
        patch.setattr(GenerationConfig, "get_generation_mode", lambda *_, **__: GenerationMode.BEAM_SEARCH)
        found = generate(
            family, source, prompt, num_beams=params.beam_width, num_return_sequences=params.n,
            max_new_tokens=params.max_tokens, min_new_tokens=params.min_tokens or None,
            length_penalty=params.length_penalty, early_stopping=params.early_stopping, eos_token_id=stop_token_ids,
        )  # fmt: skip
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    return [
        Text(row[len(prompt) : len(prompt) + length], score)
        for row, length, score in zip(found.sequences.tolist(), lengths, found.sequences_scores.tolist())
    ]


# ---- engines ----


class Driver(CoreDriver):
    """An engine core, driven step by step. It keeps every plan, and the log-probabilities of prompts."""

    def __init__(self, core: EngineCore) -> None:
        self.core: Any = core
        self.answers = {}
        self._asked: dict[str, Extraction | None] = {}
        self.plans: list[SchedulerOutput] = []
        self.overwrites_unheld_memory = True
        self._overwritten: set[int] = set()
        self._overwritten_on_host: set[int] = set()
        self.prompt_logprobs: dict[str, list[PromptLogprobsChunk]] = {}
        execute = core.executor.execute_model
        core.executor.execute_model = lambda plan: (self.plans.append(plan), execute(plan))  # type: ignore
        pool, tier = core.scheduler.kv_cache.pool, core.scheduler.kv_cache.store.tier
        pool.get_new_blocks = self._noting(pool.get_new_blocks, self._overwritten)  # type: ignore
        if tier is not None:
            tier.get_new_blocks = self._noting(tier.get_new_blocks, self._overwritten_on_host)  # type: ignore

    def _noting(self, take: Callable[..., Any], overwritten: set[int]) -> Callable[..., Any]:
        """Blocks that were taken have to be overwritten again, even if they are given back within the same step."""

        def take_and_note(*count: int) -> Any:
            taken = take(*count)
            overwritten.difference_update(block.block_id for block in taken)
            return taken

        return take_and_note

    @property
    def runner(self) -> Any:
        return self.core.executor._worker.runner

    @property
    def num_encoder_runs(self) -> int:
        """The runner's own count, which is that of the scheduler while nothing fails."""
        return self.runner.encoder.num_runs

    @property
    def num_stored(self) -> int:
        return sum(len(plan.stores) for plan in self.plans)

    @property
    def num_loaded(self) -> int:
        return sum(len(plan.loads) for plan in self.plans)

    @property
    def num_preemptions(self) -> int:
        return self.core.stats().num_preemptions

    def ask(
        self,
        request_id: str,
        source: Source,
        prompt: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        **rest: Any,
    ) -> None:
        """Add a request, as the front end would send it."""
        self.add(EngineCoreRequest(request_id, list(prompt), params, encoder_input=source.for_engine(), **rest))

    def step(self) -> None:
        for output in self.core.step().outputs:
            if output.prompt_logprobs is not None:
                self.prompt_logprobs.setdefault(output.request_id, []).extend(output.prompt_logprobs)
            self.answers[output.request_id, output.choice].take(output, self._asked[output.request_id])
        self.core.scheduler.check()
        self._overwrite_unheld_memory()

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError("it does not end")

    def _overwrite_unheld_memory(self) -> None:
        """On both sides. Blocks that the next plan copies to the host are still read, although unreferenced."""
        if not self.overwrites_unheld_memory:
            return
        kv_cache = self.core.scheduler.kv_cache
        awaited, tier = set(kv_cache.store._stores.values()), kv_cache.store.tier
        unheld = unheld_blocks(kv_cache.pool) - awaited
        free_on_host = set() if tier is None else unheld_blocks(tier)

        def write() -> None:
            self._overwrite(self.runner.kv._tensors, unheld, self._overwritten)
            self._overwrite(self.runner.kv._host_tensors, free_on_host, self._overwritten_on_host)

        self.core.executor.run_on_thread(write)  # behind the steps in flight, which may still read or write them

    def _overwrite(self, tensors: list[Tensor], unheld: set[int], overwritten: set[int]) -> None:
        new = sorted(unheld - overwritten)
        if new:
            for tensor in tensors:
                tensor[new] = GARBAGE
        overwritten.clear()
        overwritten.update(unheld)

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        answer = self.answers[request_id, choice]
        assert answer.error is None, answer.error
        assert answer.finish_reason is not None, "it has not ended"
        return list(answer.token_ids)

    def check_nothing_left(self) -> None:
        """No request, no block on either side and no row is left. Leases end."""
        self.run()
        scheduler = self.core.scheduler
        scheduler.check()
        scheduler.leases.end_all()
        kv_cache = scheduler.kv_cache
        assert kv_cache.num_free_blocks == kv_cache.num_usable_blocks
        assert kv_cache.num_free_slots == kv_cache.num_slots
        assert not kv_cache.cross_tables._held and not kv_cache.cross_tables._unwritten
        assert len(self.runner.input_batch) == 0 and len(self.runner.beam_rows) == 0


def unheld_blocks(pool: BlockPool) -> set[int]:
    """Blocks that no sequence holds, and that can't be found."""
    return {block.block_id for block in pool.blocks[1:] if block.ref_cnt == 0 and block.block_hash is None}


@contextmanager
def core_of(model: str | TinyModel, *, swap_blocks: int = 0, **settings: Any) -> Iterator[Driver]:
    """A core over a family's model, or another, which is checked afterwards. `swap_blocks`: blocks on the host."""
    tiny = tiny_model(model) if isinstance(model, str) else model
    driver = Driver(build_core(tiny, swap_blocks, **settings))
    yield driver
    driver.check_nothing_left()


def build_core(
    tiny: TinyModel,
    swap_blocks: int = 0,
    executor: Callable[..., UniProcExecutor] = UniProcExecutor,
    attention_backend: str = "auto",
    adapters: AdapterConfig | None = None,
    **settings: Any,
) -> EngineCore:
    of_cache = {name: settings.pop(name) for name in list(settings) if hasattr(CacheConfig, name)}
    cache = CacheConfig(**{"num_blocks": NUM_BLOCKS} | of_cache)
    cache = replace(cache, swap_bytes=swap_blocks * _bytes_per_block(tiny, cache.block_size))
    max_model_len = settings.pop("max_model_len", min(MAX_POSITION, tiny.config.max_position))
    scheduler = SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 32} | depth_settings() | settings)
    config = EngineConfig(
        model="tiny", device="cpu", dtype="float32", num_threads=1, max_model_len=max_model_len,
        attention_backend=attention_backend, cache=cache, scheduler=scheduler, adapters=adapters or AdapterConfig(),
    )  # fmt: skip
    config = fit_to_model(config, tiny.config)
    core = EngineCore(config, executor(config, tiny.config, tiny.source, StartupTimer()))
    assert core.executor.facts.kv_config.num_host_blocks == swap_blocks
    return core


def _bytes_per_block(tiny: TinyModel, block_size: int) -> int:
    config = tiny.config
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * block_size * 4


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **changes)


def sampled(count: int, **changes: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seed": 5}
    return SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **(values | changes))


def beams(width: int, n: int = 1, max_tokens: int = 8, **changes: Any) -> BeamSearchParams:
    values: dict[str, Any] = {"all_stop_token_ids": []}
    return BeamSearchParams(beam_width=width, n=n, max_tokens=max_tokens, **(values | changes))


def as_rows(token_ids: list[list[int]], logprobs: list[list[float]]) -> np.ndarray:
    """Lists of all tokens, best first behind the one that was chosen, as [rows, V]."""
    rows = np.full((len(token_ids), VOCAB_SIZE), np.nan, np.float32)
    for row, ids, values in zip(rows, token_ids, logprobs, strict=True):
        row[ids] = values
    return rows
