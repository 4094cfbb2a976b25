"""Random loads: requests of every kind, when each comes and goes, what goes wrong, and how much memory there is."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st
from msgspec.structs import replace

from ratoon.core.config import SchedulerConfig, SchedulingPolicy
from ratoon.core.encoder import tokens_for_encoder
from ratoon.core.kv import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    SlidingWindowSpec,
    StateSpec,
    SwapCosts,
)
from ratoon.core.media import MediaFeature
from ratoon.core.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.structured import StructuredOutput
from tests.property.adapters import ADAPTERS
from tests.property.choices import among, number, number_or_none
from tests.property.extractions import Reading, readings, states_of_texts
from tests.property.media import INPUTS as PICTURE_INPUTS
from tests.property.media import with_media

OWNERS = ["ada", "bob", "eve", None]
VOCABULARY = 6
EOS = 5
# What encoders read: few different inputs, so that many share one.
INPUTS = [tokens_for_encoder([number] * number) for number in (1, 3, 7, 12)]
FAMILIES = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4], [1, 2, 3, 4, 2, 2, 2, 2], []]
FAMILY = st.sampled_from(FAMILIES)
INPUT = st.sampled_from(INPUTS)
TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=12)
PICTURES = st.lists(st.tuples(st.sampled_from([0, 2, 2, 3]), st.integers(0, len(PICTURE_INPUTS) - 1)), max_size=3)
SUFFIX = st.lists(st.integers(0, 4), max_size=4)
STOPS = st.sampled_from([[], [], [EOS], [EOS, 0]])
ANY_GRAMMAR = StructuredOutput(json_object=True)  # the model without weights has one of its own
BUDGET = st.one_of(st.integers(1, 40), st.integers(20, 60))
POLICY = st.sampled_from(SchedulingPolicy)
BOOLEAN = st.booleans()
RESTARTS = st.sets(st.integers(1, 30), min_size=1, max_size=3)
LOST_SLOTS = st.one_of(st.just(frozenset()), st.just(frozenset()), st.frozensets(st.integers(1, 12), max_size=4))
RARE_STEPS = st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 25), max_size=2))
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
    lateness: int  # how often a branch at the most gets no token, because its mask is not known in time
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
    aborts_before_done: bool  # are those aborted before it is known that the step has ended well, or behind that?
    raises_late: bool  # has a step that raises done its work, or nothing of it?
    owners: list[str | None]  # of requests, by their numbers, around the list; a continuation has its parent's
    stops: dict[int, list[str]]  # branches in whose text the front end finds a stop string
    num_cut: int  # tokens behind the stop string, if there are so many
    seconds_to_tell: int  # steps until the front end tells how many tokens count of a text that ended in the engine
    swap_costs: SwapCosts | None  # by which some preempted branches are computed again
    lost_slots: frozenset[int]  # of the block store: transfers from and to these fail
    num_adapter_slots: int
    adapter_slowness: int  # steps until an adapter is loaded, at the most
    broken_adapters: frozenset[str]  # digests of those that can't be loaded
    num_guesses: int  # that a branch of some requests has for its next tokens, at the most
    num_sources: int  # of drafts, from which these come; 0: they are proposed from outside
    drafts_on_device: bool  # the last of these sources is on the device
    encoder_cache_size: int  # rows of images


@st.composite
def kv_configs(
    draw: st.DrawFn,
    max_model_len: int,
    shares: list[float],
    has_encoder: bool,
    host_shares: list[float],
    has_states: bool,
) -> KVCacheConfig:
    block_size = draw(number(1, 5))
    # Groups may have blocks of other sizes, most often multiples
    same = (block_size,) * 3
    sizes = draw(among(same, same, (block_size, 2 * block_size, block_size), (3, 2, 4)))
    full = FullAttentionSpec(sizes[0], 1, 8, "float16")
    window = SlidingWindowSpec(sizes[1], 2, 8, "float16", window=draw(number(1, 12)))
    wide = SlidingWindowSpec(sizes[2], 1, 5, "float32", window=draw(number(13, 20)))
    shapes = [full], [full], [window], [full, window], [window, full], [full, window, wide]
    if has_states:
        state = StateSpec(draw(among(sizes[0], 2 * sizes[0], 3)), 1, 2, 4, 10, 3)
        shapes = [state], [full, state], [state, full], [full, state, replace(state, part=1)], [window, state]
    specs = shapes[draw(among(*range(len(shapes))))]
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    blocks_of_longest = sum(-(-max_model_len // group.spec.block_size) for group in groups)
    cross = None
    if has_encoder:
        cross = KVCacheGroup(CrossAttentionSpec(block_size, 3, 8, "float16"), (0,))
        blocks_of_longest += -(-max(one.num_positions for one in INPUTS) // block_size)
    num_blocks = 2 + int(draw(among(*shares)) * blocks_of_longest)
    num_host_blocks = int(draw(among(*host_shares)) * blocks_of_longest)
    return KVCacheConfig(num_blocks, block_size, groups, cross, num_host_blocks)


@functools.cache
@st.composite
def beam_params(draw: st.DrawFn, stops: tuple[int, ...], is_long: bool) -> BeamSearchParams:
    width = draw(among(2, 3, 4) if is_long else among(1, 2, 3, 4, 6, 9))
    max_tokens = draw(number(8 if is_long else 1, 14))
    return BeamSearchParams(
        beam_width=width,
        n=draw(number(1, min(width, VOCABULARY - len(stops)))),
        max_tokens=max_tokens,
        min_tokens=draw(number(0, min(3, max_tokens))),
        length_penalty=draw(among(0.0, 1.0, -1.0)),
        early_stopping=draw(among(True, False, "never")),
        all_stop_token_ids=list(stops),
        output_kind=draw(among(RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE)),
        structured_output=draw(among(None, ANY_GRAMMAR)),
    )


@functools.cache
@st.composite
def requests(draw: st.DrawFn, index: int, traits: tuple[str, ...], has_encoder: bool) -> EngineCoreRequest:
    is_long = "swapping" in traits  # memory is short when many grow
    family = draw(FAMILY)
    prompt = family[: draw(number(0, 16))] + draw(TOKENS)
    stops = draw(STOPS)
    max_tokens = draw(number_or_none(12 if is_long else 1, 24))
    params = SamplingParams(
        n=draw(among(1, 1, 1, 2, 3, 5)),
        seed=draw(number_or_none(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(number(0, min(3, max_tokens or 3))),
        all_stop_token_ids=stops,
        stop_token_ids=stops[1:],
        logprobs=draw(among(None, 0)),
        prompt_logprobs=draw(among(None, None, None, 0)),
    )
    pooling = draw(among(*[None] * (18 if is_long else 4), "last", "mean"))
    likely_search = [True, True, False] if "searching" in traits else [True] + [False] * (9 if is_long else 2)
    is_search = pooling is None and draw(among(*likely_search))
    if pooling is not None:
        params = PoolingParams(pooling=pooling)
    elif is_search:
        params = draw(beam_params(tuple(stops), is_long)).clone()
    if pooling is None and draw(among(*([True] if "reading" in traits else []), True, False, False)):
        params.return_hidden_states = draw(states_of_texts())
        if not is_search:
            params.stop = ["."] if draw(among(False, False, True)) else None
    features: list[MediaFeature] = []
    if "seeing" in traits:
        prompt, features = with_media(prompt, draw(PICTURES))
    return EngineCoreRequest(
        f"r{index}",
        prompt,
        params,
        arrival_time=float(index),
        priority=draw(number(0, 2)),
        cache_salt=draw(among(None, None, "a", "b")),
        adapter=draw(among(None, *ADAPTERS)) if "adapted" in traits else None,
        encoder_input=draw(INPUT) if has_encoder else None,
        mm_features=features,
        retain_kv=draw(among(1000.0, 1000.0, 4.0, None)),
        session=draw(among(None, "s", "s", "t")) if "conversing" in traits else None,
        retention=draw(among(None, None, "in_memory", "24h")) if "conversing" in traits else None,
    )


@functools.cache
@st.composite
def children(draw: st.DrawFn, num_parents: int) -> Child:
    return Child(
        step=draw(number(3, 60)),
        parent=draw(number(0, num_parents - 1)),
        choice=draw(among(0, 0, 1, 2)),
        num_left_out=draw(among(0, 0, 0, 1, 2, 5)),
        suffix=draw(SUFFIX),
        retain_kv=draw(among(None, 4.0, 1000.0)),
        params=SamplingParams(
            n=draw(among(1, 1, 3)),
            seed=draw(number(0, 3)),
            max_tokens=draw(number(1, 12)),
            all_stop_token_ids=[],
        ),
    )


@functools.cache
def _readings(num_parents: int, has_encoder: bool) -> st.SearchStrategy[Reading]:
    parent = st.integers(0, num_parents - 1)
    return readings(st.one_of(st.none(), parent, parent), FAMILY, INPUT if has_encoder else st.sampled_from([None]))


@functools.cache
def _some_steps(ids: tuple[str, ...]) -> st.SearchStrategy[dict[int, list[str]]]:
    return st.dictionaries(st.integers(0, 25), st.lists(st.sampled_from(ids), max_size=2), max_size=2)


@functools.cache
def _some_stops(branch_ids: tuple[str, ...]) -> st.SearchStrategy[dict[int, list[str]]]:
    some = st.lists(st.sampled_from(branch_ids), min_size=1, max_size=3)
    return st.one_of(st.just({}), st.dictionaries(st.integers(2, 25), some, max_size=6))


@st.composite
def loads(draw: st.DrawFn, *traits: str) -> Load:
    """rooted: memory for leases, and many continuations; searching: many beams, and memory for a few of them; reading:
    many extractions; encoding: a model with an encoder, which others are now and then; swapping: little memory, and
    some on the host; restarting: the engine dies now and then; owned: requests are of several owners; guessing: next
    tokens are guessed; adapted: requests name adapters, of which there are more than slots; seeing: prompts have
    images; conversing: requests are of sessions, and say where their blocks are kept; stateful: some layers have a
    state."""
    rooted, swapping, adapted, seeing = (trait in traits for trait in ("rooted", "swapping", "adapted", "seeing"))
    shares = POOL_SHARES[next((trait for trait in traits if trait in POOL_SHARES), "any")]
    host_shares = [0.3, 1.0, 3.0] if swapping else [0.0, 0.0, 1.0]
    has_encoder = "encoding" in traits or (not seeing and "stateful" not in traits and draw(among(False, False, True)))
    num_requests = draw(number(4 if swapping else 1, 10))
    all_requests = [draw(requests(index, traits, has_encoder)) for index in range(num_requests)]
    arrivals: dict[int, list[EngineCoreRequest]] = defaultdict(list)
    for request in all_requests:
        arrivals[draw(among(0, 0, 1, 2) if swapping else among(0, 0, 1, 2, 5, 12, 20))].append(request)
    one_reading = _readings(len(all_requests), has_encoder)
    all_readings = draw(st.lists(one_reading, max_size=12 if "reading" in traits else 3))
    ids = [request.request_id for request in all_requests] + [f"x{number}" for number in range(len(all_readings))]
    ids += [f"{request.request_id}.states" for request in all_requests]
    some_steps = _some_steps(tuple(ids))
    branch_ids = [f"r{index}{suffix}" for index in range(num_requests) for suffix in ("", "", "#1")]
    max_model_len = draw(number(30, 50) if seeing else number(16, 40))
    burst = draw(among(1, 1, 3))
    has_states = "stateful" in traits
    lateness = 0 if has_states else draw(among(0, 0, 2, 6))
    return Load(
        SchedulerConfig(
            max_num_batched_tokens=draw(BUDGET),
            max_num_seqs=draw(number(4, 12) if "searching" in traits or swapping else number(1, 8)),
            max_prefill_chunk=draw(number_or_none(1, 9)),
            max_steps_in_flight=draw(among(1, 2, 2, 3)),
            max_num_encoder_tokens=draw(among(3, 8, 14, 1000)),
            policy=draw(POLICY),
            enable_chunked_prefill=draw(among(True, True, False)),
            max_steps_of_branch=draw(among(None, None, 1)),
            num_rounds=draw(among(1, 1, 2, 3)),
            whole_images=seeing and draw(BOOLEAN),
        ),
        draw(kv_configs(max_model_len, shares, has_encoder, host_shares, has_states)),
        caching=draw(among(True, True, True, False)),
        max_model_len=max_model_len,
        burst=burst,
        lateness=lateness,
        arrivals=arrivals,
        aborts=draw(some_steps),
        mid_step_aborts=draw(some_steps),
        raising_steps=set(draw(RARE_STEPS)),
        bad_rows=set(draw(RARE_STEPS)),
        restarts=draw(RESTARTS) if "restarting" in traits else set(),
        children=draw(st.lists(children(len(all_requests)), min_size=3 if rooted else 0, max_size=8 if rooted else 5)),
        readings=all_readings,
        lease_fraction=draw(among(0.5, 1.0) if rooted else among(0.0, 0.3, 0.5, 1.0)),
        ended_leases=draw(some_steps),
        aborts_before_done=draw(BOOLEAN),
        raises_late=draw(BOOLEAN),
        owners=draw(st.lists(st.sampled_from(OWNERS), min_size=2, max_size=5)) if "owned" in traits else [None],
        stops=draw(_some_stops(tuple(branch_ids))),
        num_cut=draw(among(0, 0, 1, 3)),
        seconds_to_tell=draw(among(0, 0, 1, 4)),
        swap_costs=draw(among(None, None, SwapCosts(3.0, 1.0), SwapCosts(4.0, 1.0))),
        lost_slots=draw(LOST_SLOTS),
        num_adapter_slots=draw(number(1, 3)) if adapted else 0,
        adapter_slowness=draw(among(0, 1, 4)),
        broken_adapters=draw(among(frozenset(), frozenset(), frozenset({ADAPTERS[0].digest}))),
        num_guesses=0 if has_states else draw(among(2, 5) if "guessing" in traits else among(0, 0, 0, 3)),
        num_sources=draw(among(0, 1, 2)),
        drafts_on_device=draw(BOOLEAN),
        encoder_cache_size=draw(among(6, 6, 8, 11, 100)) if seeing else 1,
    )
