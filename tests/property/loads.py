"""Random loads: requests of every kind, when each comes and goes, what goes wrong, and how much memory there is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st

from ratoon.core.config import SchedulerConfig, SchedulingPolicy
from ratoon.core.encoder import tokens_for_encoder
from ratoon.core.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ratoon.core.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreRequest
from tests.property.extractions import Reading, readings

OWNERS = ["ada", "bob", "eve", None]
VOCABULARY = 6
EOS = 5
# What encoders read: few different inputs, so that many share one.
INPUTS = [tokens_for_encoder([number] * number) for number in (1, 3, 7, 12)]
FAMILIES = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4], [1, 2, 3, 4, 2, 2, 2, 2], []]
# What pools hold of the longest sequence: just that, or a few; sometimes less.
POOL_SHARES = {
    "any": [0.6, 1.0, 1.0, 1.2, 1.6, 2.5],
    "rooted": [2.0, 4.0, 8.0],
    "searching": [1.5, 2.0, 2.5, 3.0],
    "encoding": [1.0, 1.3, 2.0, 4.0, 8.0],
    "swapping": [1.0, 1.0, 1.2, 1.4],
}


@dataclass
class Child:
    """A continuation of an earlier request, as far as that one has come by then."""

    step: int
    parent: int  # its number
    choice: int
    num_left_out: int  # of the parent's tokens, from the end
    suffix: list[int]
    retain_kv: float | None
    params: SamplingParams


@dataclass
class Load:
    """Everything that happens in one example."""

    scheduler: SchedulerConfig
    kv: KVCacheConfig
    caching: bool
    max_model_len: int
    burst: int
    arrivals: dict[int, list[EngineCoreRequest]]  # step → requests
    aborts: dict[int, list[str]]
    mid_step_aborts: dict[int, list[str]]  # while the step runs
    raising_steps: set[int]
    bad_rows: set[int]  # steps in which the first sampled branch has NaN logits, or the first vector a NaN
    restarts: set[int]  # steps before which the engine dies and another one goes on
    children: list[Child]
    readings: list[Reading]
    lease_fraction: float
    ended_leases: dict[int, list[str]]
    apart: bool  # are the requests of a step that raises tried one by one?
    raises_late: bool  # has a step that raises done its work, or nothing of it?
    owners: list[str | None]  # of requests, by their numbers, around the list; a continuation has its parent's


@st.composite
def kv_configs(
    draw: st.DrawFn, max_model_len: int, shares: list[float], has_encoder: bool, host_shares: list[float]
) -> KVCacheConfig:
    block_size = draw(st.integers(1, 5))
    full = FullAttentionSpec(block_size, 1, 8, "float16")
    window = SlidingWindowSpec(block_size, 2, 8, "float16", window=draw(st.integers(1, 12)))
    wide = SlidingWindowSpec(block_size, 1, 5, "float32", window=draw(st.integers(13, 20)))
    specs = draw(st.sampled_from([[full], [full], [window], [full, window], [window, full], [full, window, wide]]))
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    blocks_of_longest = len(groups) * -(-max_model_len // block_size)
    cross = None
    if has_encoder:
        cross = KVCacheGroup(CrossAttentionSpec(block_size, 3, 8, "float16"), (0,))
        blocks_of_longest += -(-max(one.num_positions for one in INPUTS) // block_size)
    num_blocks = 2 + int(draw(st.sampled_from(shares)) * blocks_of_longest)
    num_host_blocks = int(draw(st.sampled_from(host_shares)) * blocks_of_longest)
    return KVCacheConfig(num_blocks, block_size, groups, cross, num_host_blocks)


@st.composite
def beam_params(draw: st.DrawFn, stops: list[int], is_long: bool) -> BeamSearchParams:
    width = draw(st.sampled_from([2, 3, 4] if is_long else [1, 2, 3, 4, 6, 9]))
    max_tokens = draw(st.integers(8 if is_long else 1, 14))
    return BeamSearchParams(
        beam_width=width,
        n=draw(st.integers(1, min(width, VOCABULARY - len(stops)))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        length_penalty=draw(st.sampled_from([0.0, 1.0, -1.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        all_stop_token_ids=stops,
        output_kind=draw(st.sampled_from([RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])),
    )


@st.composite
def requests(draw: st.DrawFn, index: int, traits: tuple[str, ...], has_encoder: bool) -> EngineCoreRequest:
    is_long = "swapping" in traits  # memory is short when many grow
    family = draw(st.sampled_from(FAMILIES))
    prompt = family[: draw(st.integers(0, 16))] + draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    stops = draw(st.sampled_from([[], [], [EOS], [EOS, 0]]))
    max_tokens = draw(st.one_of(st.none(), st.integers(12 if is_long else 1, 24)))
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3, 5])),
        seed=draw(st.one_of(st.none(), st.integers(0, 3))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens or 3))),
        all_stop_token_ids=stops,
        stop_token_ids=stops[1:],
        logprobs=draw(st.sampled_from([None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )
    pooling = draw(st.sampled_from([None] * (18 if is_long else 4) + ["last", "mean"]))
    likely_search = [True, True, False] if "searching" in traits else [True] + [False] * (9 if is_long else 2)
    is_search = pooling is None and draw(st.sampled_from(likely_search))
    beams = draw(beam_params(stops, is_long)) if is_search else None
    if pooling is not None:
        params = SamplingParams(max_tokens=1, detokenize=False)
    elif beams is not None:
        params = SamplingParams(n=beams.n, max_tokens=beams.max_tokens)
    return EngineCoreRequest(
        f"r{index}",
        prompt,
        params,
        beam_params=beams,
        arrival_time=float(index),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from([None, None, "a", "b"])),
        pooling_params=None if pooling is None else PoolingParams(pooling=pooling),
        encoder_input=draw(st.sampled_from(INPUTS)) if has_encoder else None,
        retain_kv=draw(st.sampled_from([1000.0, 1000.0, 4.0, None])),
    )


@st.composite
def children(draw: st.DrawFn, num_parents: int) -> Child:
    return Child(
        step=draw(st.integers(3, 60)),
        parent=draw(st.integers(0, num_parents - 1)),
        choice=draw(st.sampled_from([0, 0, 1, 2])),
        num_left_out=draw(st.sampled_from([0, 0, 0, 1, 2, 5])),
        suffix=draw(st.lists(st.integers(0, 4), max_size=4)),
        retain_kv=draw(st.sampled_from([None, 4.0, 1000.0])),
        params=SamplingParams(
            n=draw(st.sampled_from([1, 1, 3])),
            seed=draw(st.integers(0, 3)),
            max_tokens=draw(st.integers(1, 12)),
            all_stop_token_ids=[],
        ),
    )


@st.composite
def loads(draw: st.DrawFn, *traits: str) -> Load:
    """rooted: memory for leases, and many continuations; searching: many beams, and memory for a few of them; reading:
    many extractions; encoding: a model with an encoder, which others are now and then; swapping: little memory, and
    some on the host; restarting: the engine dies now and then; owned: requests are of several owners."""
    rooted, swapping = "rooted" in traits, "swapping" in traits
    shares = POOL_SHARES[next((trait for trait in traits if trait in POOL_SHARES), "any")]
    host_shares = [0.3, 1.0, 3.0] if swapping else [0.0, 0.0, 1.0]
    has_encoder = "encoding" in traits or draw(st.sampled_from([False, False, True]))
    num_requests = draw(st.integers(4 if swapping else 1, 10))
    all_requests = [draw(requests(index, traits, has_encoder)) for index in range(num_requests)]
    arrivals: dict[int, list[EngineCoreRequest]] = defaultdict(list)
    for request in all_requests:
        arrivals[draw(st.sampled_from([0, 0, 1, 2] if swapping else [0, 0, 1, 2, 5, 12, 20]))].append(request)
    one_reading = readings(len(all_requests), FAMILIES, INPUTS if has_encoder else [None])
    all_readings = draw(st.lists(one_reading, max_size=12 if "reading" in traits else 3))
    ids = [request.request_id for request in all_requests] + [f"x{number}" for number in range(len(all_readings))]
    some_steps = st.dictionaries(st.integers(0, 25), st.lists(st.sampled_from(ids), max_size=2), max_size=2)
    max_model_len = draw(st.integers(16, 40))
    rare_steps = st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 25), max_size=2))
    return Load(
        SchedulerConfig(
            max_num_batched_tokens=draw(st.one_of(st.integers(1, 40), st.integers(20, 60))),
            max_num_seqs=draw(st.integers(4, 12) if "searching" in traits or swapping else st.integers(1, 8)),
            max_prefill_chunk=draw(st.one_of(st.none(), st.integers(1, 9))),
            max_num_encoder_tokens=draw(st.sampled_from([3, 8, 14, 1000])),
            policy=draw(st.sampled_from(SchedulingPolicy)),
            enable_chunked_prefill=draw(st.sampled_from([True, True, False])),
        ),
        draw(kv_configs(max_model_len, shares, has_encoder, host_shares)),
        caching=draw(st.sampled_from([True, True, True, False])),
        max_model_len=max_model_len,
        burst=draw(st.sampled_from([1, 1, 3])),
        arrivals=arrivals,
        aborts=draw(some_steps),
        mid_step_aborts=draw(some_steps),
        raising_steps=set(draw(rare_steps)),
        bad_rows=set(draw(rare_steps)),
        restarts=draw(st.sets(st.integers(1, 30), min_size=1, max_size=3)) if "restarting" in traits else set(),
        children=draw(st.lists(children(len(all_requests)), min_size=3 if rooted else 0, max_size=8 if rooted else 5)),
        readings=all_readings,
        lease_fraction=draw(st.sampled_from([0.5, 1.0] if rooted else [0.0, 0.3, 0.5, 1.0])),
        ended_leases=draw(some_steps),
        apart=draw(st.booleans()),
        raises_late=draw(st.booleans()),
        owners=draw(st.lists(st.sampled_from(OWNERS), min_size=2, max_size=5)) if "owned" in traits else [None],
    )
