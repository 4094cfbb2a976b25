"""The work that engines are compared on: what a round of each workload does, which figures it gives, and their floors.

Every prompt is new, so a prefix cache finds only what a workload put there. All engines get the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from peers.process import CallFailedError, EngineProcess
from peers.protocol import TokenIds
from workloads import Figure, PromptSource

from compare_parts import floors
from compare_parts.floors import Precision, Shape

LENGTHS_SEED = 1
TEMPERATURE = 0.6  # of the throughput workload: tokens are sampled, as in most use
STARTUP = "startup"  # has no round: it is timed while the engine starts
BEAM_SHAPES = ((4, 3), (8, 64))  # width and tokens: further ones beside the main shape


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and numbers of requests."""

    decode_input: int = 128
    decode_output: int = 256
    batch: int = 32
    requests: int = 256
    shortest: int = 100  # of the throughput workload, in and out
    longest: int = 1024
    prefill: int = 8192
    cached_input: int = 500
    cached_output: int = 200
    suffix: int = 5
    beam_input: int = 700
    beam_width: int = 32
    beam_tokens: int = 3
    beam_requests: int = 32

    @property
    def cached(self) -> int:
        return self.cached_input + self.cached_output

    @property
    def max_model_len(self) -> int:
        return max(self.prefill + self.longest, 2 * self.longest)

    def request_lengths(self) -> list[tuple[int, int]]:
        """Tokens in and out of each request of the throughput workload: the same in every round."""
        source = random.Random(LENGTHS_SEED)
        lengths = [source.randint(self.shortest, self.longest) for _ in range(2 * self.requests)]
        return list(zip(lengths[::2], lengths[1::2]))


QUICK = Sizes(
    decode_input=8,
    decode_output=4,
    batch=3,
    requests=5,
    shortest=2,
    longest=12,
    prefill=40,
    cached_input=20,
    cached_output=4,
    suffix=3,
    beam_input=20,
    beam_width=4,
    beam_requests=2,
)


class Load:
    """Asks one engine, and checks that it did all of the work."""

    def __init__(self, engine: EngineProcess, source: PromptSource, sizes: Sizes) -> None:
        self.engine = engine
        self.source = source
        self.sizes = sizes

    def prompts(self, count: int, length: int) -> TokenIds:
        return [self.source.prompt(length) for _ in range(count)]

    def generate(
        self, prompts: TokenIds, num_tokens: int | list[int], temperature: float = 0.0
    ) -> tuple[float, TokenIds]:
        result = self.engine.call("generate", prompts=prompts, num_tokens=num_tokens, temperature=temperature)
        asked = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        self._check("tokens", [len(tokens) for tokens in result.value], asked)
        return result.seconds, result.value

    def search(self, prompts: TokenIds, width: int, num_tokens: int) -> float:
        result = self.engine.call("beam_searches", prompts=prompts, width=width, num_tokens=num_tokens)
        found = [[len(beam) for beam in beams] for beams in result.value]
        self._check("tokens of beams", found, [[num_tokens] * width] * len(prompts))
        return result.seconds

    def _check(self, what: str, found: list[object], asked: list[object]) -> None:
        if found != asked:
            raise CallFailedError(f"{self.engine.engine} answered with {what} {found}, not {asked}"[:500])


Round: TypeAlias = dict[str, float]  # figure → value


def decode(batch: Callable[[Sizes], int], key: str) -> Callable[[Load], Round]:
    """A step is what the whole answer takes beyond its first token, which other prompts of this length have timed."""

    def measure(load: Load) -> Round:
        sizes, count = load.sizes, batch(load.sizes)
        first, _ = load.generate(load.prompts(count, sizes.decode_input), 1)
        whole, _ = load.generate(load.prompts(count, sizes.decode_input), 1 + sizes.decode_output)
        return {key: 1e3 * (whole - first) / sizes.decode_output}

    return measure


def throughput(load: Load) -> Round:
    lengths = load.sizes.request_lengths()
    prompts = [load.source.prompt(num_in) for num_in, _ in lengths]
    asked = [num_out for _, num_out in lengths]
    seconds, _ = load.generate(prompts, asked, TEMPERATURE)
    return {"throughput_256req_out_tok_s": sum(asked) / seconds}


def prefill(load: Load) -> Round:
    seconds, _ = load.generate(load.prompts(1, load.sizes.prefill), 1)
    return {"ttft_8192_ms": 1e3 * seconds}


def continuation(load: Load) -> Round:
    """The second stage of a request in two: a prompt and its answer are known, a few tokens are new."""
    sizes = load.sizes
    prompt = load.source.prompt(sizes.cached_input)
    _, (answer,) = load.generate([prompt], sizes.cached_output)
    seconds, _ = load.generate([prompt + answer + load.source.prompt(sizes.suffix)], 1)
    cold, _ = load.generate(load.prompts(1, sizes.cached + sizes.suffix), 1)
    return {"continuation_ttft_ms": 1e3 * seconds, "cold_705_ttft_ms": 1e3 * cold}


def leased_continuation(load: Load) -> Round:
    """The same through Ratoon's continuations: nothing of the parent is computed again."""
    sizes = load.sizes
    load.engine.call("keep", prompt=load.source.prompt(sizes.cached_input), num_tokens=sizes.cached_output)
    result = load.engine.call("continue_kept", suffix=load.source.prompt(sizes.suffix), num_tokens=1)
    return {"continuation_leased_ttft_ms": 1e3 * result.seconds}


def beam(load: Load) -> Round:
    sizes = load.sizes
    prompts = load.prompts(1, sizes.beam_input)
    return {"beam32x3_700_ms": 1e3 * load.search(prompts, sizes.beam_width, sizes.beam_tokens)}


def beams_at_once(load: Load) -> Round:
    sizes = load.sizes
    prompts = load.prompts(sizes.beam_requests, sizes.beam_input)
    return {"beam32x3_700_32req_ms": 1e3 * load.search(prompts, sizes.beam_width, sizes.beam_tokens)}


def beam_shapes(load: Load) -> Round:
    prompts = load.prompts(len(BEAM_SHAPES), load.sizes.beam_input)
    return {
        f"beam{width}x{num_tokens}_700_ms": 1e3 * load.search([prompt], width, num_tokens)
        for (width, num_tokens), prompt in zip(BEAM_SHAPES, prompts)
    }


@dataclass(frozen=True)
class Workload:
    measure: Callable[[Load], Round]
    rounds: int  # after one that is not counted: it compiles and captures what its shapes need
    ours_alone: bool = False


WORKLOADS = {
    "decode1": Workload(decode(lambda sizes: 1, "decode_bs1_ms_per_token"), 5),
    "decode32": Workload(decode(lambda sizes: sizes.batch, "decode_bs32_ms_per_step"), 3),
    "prefill": Workload(prefill, 5),
    "continue": Workload(continuation, 7),
    "continue-leased": Workload(leased_continuation, 7, ours_alone=True),
    "beam": Workload(beam, 3),
    "beam32": Workload(beams_at_once, 2),
    "beam-shapes": Workload(beam_shapes, 3),
    "throughput": Workload(throughput, 2),
}

FIGURES = {
    "startup_s": Figure("start-up to first token", "s", False),
    "decode_bs1_ms_per_token": Figure("decode, batch 1, a token", "ms", False),
    "decode_bs32_ms_per_step": Figure("decode, batch 32, a step", "ms", False),
    "throughput_256req_out_tok_s": Figure("256 requests, output", "tok/s", True),
    "ttft_8192_ms": Figure("TTFT of 8,192 tokens", "ms", False),
    "continuation_ttft_ms": Figure("700 in the prefix cache + 5, TTFT", "ms", False),
    "continuation_leased_ttft_ms": Figure("700 leased + 5, TTFT", "ms", False),
    "cold_705_ttft_ms": Figure("the same 705 computed, TTFT", "ms", False),
    "beam32x3_700_ms": Figure("beams 32 × 3 after 700", "ms", False),
    "beam32x3_700_32req_ms": Figure("32 such at once", "ms", False),
    "beam4x3_700_ms": Figure("beams 4 × 3 after 700", "ms", False),
    "beam8x64_700_ms": Figure("beams 8 × 64 after 700", "ms", False),
    # of images.py
    "picture_ttft_ms": Figure("one new picture, TTFT", "ms", False),
    "pictures_32req_ms": Figure("32 new pictures at once", "ms", False),
    "shared_picture_32req_ms": Figure("32 questions about one new picture", "ms", False),
}
# What a peer has in the place of a figure that is ours alone.
PEER_FIGURES = {"continuation_leased_ttft_ms": "continuation_ttft_ms"}


def floors_of(shape: Shape, precision: Precision, sizes: Sizes) -> dict[str, float]:
    """By figure, in its unit. Start-up has none."""

    def decode_ms(batch: int) -> float:
        context = sizes.decode_input + sizes.decode_output / 2
        return 1e3 * floors.decode([context] * batch).seconds(shape, precision)

    def search_ms(num_prompts: int, width: int, num_tokens: int) -> float:
        return 1e3 * floors.beam_search(num_prompts, sizes.beam_input, width, num_tokens, shape, precision)

    step = 1e3 * floors.prefill(sizes.suffix, sizes.cached).seconds(shape, precision)
    return {
        "decode_bs1_ms_per_token": decode_ms(1),
        "decode_bs32_ms_per_step": decode_ms(sizes.batch),
        "throughput_256req_out_tok_s": floors.throughput(sizes.request_lengths(), shape, precision),
        "ttft_8192_ms": 1e3 * floors.prefill(sizes.prefill).seconds(shape, precision),
        "continuation_ttft_ms": step,
        "continuation_leased_ttft_ms": step,
        "cold_705_ttft_ms": 1e3 * floors.prefill(sizes.cached + sizes.suffix).seconds(shape, precision),
        "beam32x3_700_ms": search_ms(1, sizes.beam_width, sizes.beam_tokens),
        "beam32x3_700_32req_ms": search_ms(sizes.beam_requests, sizes.beam_width, sizes.beam_tokens),
        **{f"beam{width}x{count}_700_ms": search_ms(1, width, count) for width, count in BEAM_SHAPES},
    }
