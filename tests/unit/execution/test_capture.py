"""Hidden states, read out of plans that are written by hand: which rows, of which layers, and what is not written."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import MAX_CAPTURE_SPANS, BeamStep, BlockCopy, CaptureStep, NewRequestData, SchedulerOutput
from ratoon.execution.inputs.batch_rows import StepBatch
from ratoon.execution.passes.ends import EndRows, InnerLayers, LayerRows, Logits, ProgramRows, States
from ratoon.execution.passes.program import HOST_COLUMNS, ProgramEnds, ProgramStep, StepProgram
from ratoon.execution.passes.step_context import PagedStep
from ratoon.execution.readers.hidden_states import CapturedRows, CaptureReader, CaptureReaders, lay_out_spans
from ratoon.execution.readers.interface import ExecutedPass, RowReader, StepLayout
from ratoon.layers.shard import Stage
from ratoon.models.base import FinalStates
from tests.golden.hidden_oracle import states_by_transformers
from tests.golden.tiny_models import TinyModel, tiny_gpt2, tiny_qwen3
from tests.unit.execution.test_model_runner import (
    BACKENDS,
    LLAMA,
    OTHER,
    PROMPT,
    TWO_GROUPS,
    WITH_LOGPROBS,
    Driver,
    oracle_greedy,
    token_of,
)
from tests.unit.execution.test_pooling import oracle_vector, pooled_branch, vector

ALL_LAYERS = [0, 1, 2, 3, 4]  # of three, and the final norm
MODELS = {"one group": LLAMA, "two groups": TWO_GROUPS, "gpt2": tiny_gpt2(), "qwen3": tiny_qwen3()}


def capture_of(
    driver: Driver,
    req_id: str,
    token_ids: Sequence[int],
    spans: list[tuple[int, int, bool]],
    first_block: int,
    *,
    captured: list[int] | None = None,  # all rows, unless said
    layers: Sequence[int] = ALL_LAYERS,
    dtype: str = "float32",
) -> CaptureStep:
    """The blocks are numbered as `Driver.new` numbers them."""
    blocks = range(first_block, first_block + len(token_ids) // 16 + 2)
    rows = [token for first, count, _ in spans for token in token_ids[first : first + count]]
    tables = tuple([block + 10 * group for block in blocks] for group in range(len(driver.groups)))
    captured = list(range(len(rows))) if captured is None else captured
    return CaptureStep(req_id, rows, spans, tables, captured, list(layers), dtype)


def run(
    driver: Driver, captures: list[CaptureStep], new: Sequence[NewRequestData] = (), **rest: Any
) -> ModelRunnerOutput:
    """A step of these captures, after new branches."""
    total = sum(len(branch.token_ids) for branch in [*new, *captures])
    return driver.step(new=new, captures=captures, total_num_scheduled_tokens=total, **rest)


def states(output: ModelRunnerOutput, req_id: str) -> np.ndarray:
    tensor = output.hidden_states[req_id]
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def oracle(tiny: TinyModel, token_ids: Sequence[int]) -> np.ndarray:
    return states_by_transformers(tiny.oracle, token_ids)


def cache_bytes(driver: Driver) -> dict[int, torch.Tensor]:
    return {layer: tensor.clone() for layer, (tensor,) in driver.runner.kv.of_layer.items()}


def changed_blocks(driver: Driver, before: dict[int, torch.Tensor]) -> set[int]:
    found: set[int] = set()
    for layer, (tensor,) in driver.runner.kv.of_layer.items():
        found.update((tensor != before[layer]).flatten(start_dim=1).any(dim=1).nonzero().flatten().tolist())
    return found


# ---- rows of plans ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["one group", "two groups", "gpt2"])
def test_rows_that_are_written_are_read_out_in_passing(model: str, backend: str) -> None:
    driver = Driver(MODELS[model], backend)
    capture = capture_of(driver, "x", PROMPT, [(0, 37, True)], 1, captured=[0, 5, 6, 36])
    output = run(driver, [capture])
    assert_close(states(output, "x"), oracle(MODELS[model], PROMPT)[:, [0, 5, 6, 36]])
    assert output.req_ids == [] and not output.errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["one group", "gpt2"])
def test_rows_that_are_there_are_read_in_other_peoples_blocks_and_nothing_is_written(model: str, backend: str) -> None:
    driver = Driver(MODELS[model], backend)
    driver.step(new=[driver.new("a", PROMPT, 1)])
    before = cache_bytes(driver)
    spans = [(0, 1, False), (15, 3, False), (36, 1, False)]
    output = run(driver, [capture_of(driver, "x", PROMPT, spans, 1)])
    assert_close(states(output, "x"), oracle(MODELS[model], PROMPT)[:, [0, 15, 16, 17, 36]])
    assert changed_blocks(driver, before) <= {0}
    assert driver.decode("a", 37, 2) == oracle_greedy(MODELS[model], PROMPT, 3)[1:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_in_chunks_has_the_states_of_the_whole(backend: str) -> None:
    driver = Driver(TWO_GROUPS, backend)
    parts = []
    for first, count in ((0, 5), (5, 20), (25, 12)):
        output = run(driver, [capture_of(driver, "x", PROMPT, [(first, count, True)], 1)])
        parts.append(states(output, "x"))
    assert_close(np.concatenate(parts, axis=1), oracle(TWO_GROUPS, PROMPT))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_behind_the_shared_ones_is_written_into_a_copy(backend: str) -> None:
    driver = Driver(backend=backend)
    driver.step(new=[driver.new("a", PROMPT, 1)])
    longer = [*PROMPT, 50]
    capture = capture_of(driver, "x", longer, [(3, 1, False), (37, 1, True)], 1)
    capture.block_ids[0][2] = 9
    before = cache_bytes(driver)
    output = run(driver, [capture], block_copies=[BlockCopy("x", 0, 2, 3, 9)])
    assert_close(states(output, "x"), oracle(LLAMA, longer)[:, [3, 37]])
    assert changed_blocks(driver, before) <= {0, 9}
    assert driver.decode("a", 37, 2) == oracle_greedy(LLAMA, PROMPT, 3)[1:]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_many_in_one_step_each_get_their_own_rows_layers_and_dtypes(model: str, backend: str) -> None:
    if model == "qwen3" and backend in ("native", "recorded"):
        pytest.skip("the kernels do not take its heads")
    tiny = MODELS[model]
    driver = Driver(tiny, backend)
    x = capture_of(driver, "x", PROMPT, [(0, 37, True)], 1, captured=[3, 36], layers=[4, 0])
    y = capture_of(driver, "y", OTHER, [(0, 21, True)], 21, layers=[3], dtype="float16")
    z = capture_of(driver, "z", OTHER[:9], [(0, 9, True)], 4, captured=[8], layers=[2, 3, 2])
    nothing = capture_of(driver, "nothing", OTHER[:4], [(0, 4, True)], 7, captured=[])
    output = run(driver, [x, nothing, y, z])
    assert set(output.hidden_states) == {"x", "y", "z"}
    assert_close(states(output, "x"), oracle(tiny, PROMPT)[[4, 0]][:, [3, 36]])
    assert_close(states(output, "z"), oracle(tiny, OTHER[:9])[[2, 3, 2]][:, [8]])
    assert states(output, "y").dtype == np.float16
    np.testing.assert_allclose(states(output, "y"), oracle(tiny, OTHER)[[3]], atol=5e-3, rtol=0)


# ---- beside others ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_branch_are_read_in_its_own_step_and_run_once(backend: str) -> None:
    driver = Driver(backend=backend)
    new = [driver.new("a", OTHER, 1), driver.new("b", PROMPT, 6)]
    last = CaptureStep("x", [], [], (), [20], [4], "float32", branch_id="a")
    some = CaptureStep("y", [], [], (), [3, 36], [0, 4], "float32", branch_id="b")
    own = capture_of(driver, "z", PROMPT[:30], [(0, 30, True)], 20, captured=[29], layers=[4])
    output = run(driver, [last, own, some], new=new, sampled=["a", "b"])
    assert driver.runner.num_computed_tokens == len(OTHER) + len(PROMPT) + 30
    assert_close(states(output, "x"), oracle(LLAMA, OTHER)[[4]][:, [20]])
    assert_close(states(output, "y"), oracle(LLAMA, PROMPT)[[0, 4]][:, [3, 36]])
    assert_close(states(output, "z"), oracle(LLAMA, PROMPT[:30])[[4]][:, [29]])
    assert token_of(output, "a") == oracle_greedy(LLAMA, OTHER, 1)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_vectors_and_log_probabilities_of_the_same_step_are_their_own(backend: str) -> None:
    alone, mixed = Driver(backend=backend), Driver(backend=backend)
    asking = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
    found = []
    for driver in (alone, mixed):
        branches = [
            driver.new("a", OTHER, 1, params=WITH_LOGPROBS),
            driver.new("b", OTHER[:9], 6, params=asking),
            pooled_branch(driver, "p", PROMPT, 11, "mean"),
        ]
        captures = [capture_of(driver, "x", PROMPT[:30], [(0, 30, True)], 20, captured=[2, 29])]
        captures.append(capture_of(driver, "y", OTHER[5:], [(0, 16, True)], 30, captured=[15], layers=[4]))
        extra = [] if driver is alone else captures
        found.append(run(driver, extra, new=branches, sampled=["a", "b"], pooled_req_ids=["p"]))
    for output in found:
        assert (token_of(output, "a"), token_of(output, "b")) == (
            oracle_greedy(LLAMA, OTHER, 1)[0],
            oracle_greedy(LLAMA, OTHER[:9], 1)[0],
        )
        np.testing.assert_allclose(vector(output), oracle_vector(LLAMA, PROMPT, "mean"), atol=1e-4)
    if backend in ("native", "recorded"):
        assert found[0].logprobs == found[1].logprobs and found[0].prompt_logprobs == found[1].prompt_logprobs
    assert_close(states(found[1], "x"), oracle(LLAMA, PROMPT[:30])[:, [2, 29]])
    assert_close(states(found[1], "y"), oracle(LLAMA, OTHER[5:])[[4]][:, [15]])
    assert mixed.decode("a", len(OTHER), 2) == oracle_greedy(LLAMA, OTHER, 3)[1:]


def test_a_step_with_nothing_to_read_out_runs_the_ordinary_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(CaptureReader, "__init__", None)
    assert token_of(driver.step(new=[driver.new("a", PROMPT, 1)]), "a") == oracle_greedy(LLAMA, PROMPT, 1)[0]


def test_spans_take_rows_beside_those_of_branches_and_give_them_back() -> None:
    """As many as a plan may have, while every branch has its row too."""
    driver = Driver(max_num_reqs=2)
    driver.step(new=[driver.new("a", PROMPT, 1), driver.new("b", OTHER, 5)])
    spans = [(position % 37, 1, False) for position in range(MAX_CAPTURE_SPANS)]
    for _ in range(3):
        output = run(driver, [capture_of(driver, "x", PROMPT, spans, 1)])
        assert_close(states(output, "x"), oracle(LLAMA, PROMPT)[:, [position for position, _, _ in spans]])
    assert set(driver.runner.input_batch.row_of) == {"a", "b"}
    driver.step(finished_req_ids=["a", "b"], new=[driver.new("c", OTHER, 5)])
    assert driver.decode("c", len(OTHER), 2) == oracle_greedy(LLAMA, OTHER, 3)[1:]


def test_rows_are_given_back_when_a_step_cannot_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    num_free = len(driver.runner.input_batch._free_rows)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(driver.runner.inputs, "prepare", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(driver, [capture_of(driver, "x", PROMPT, [(0, 37, True)], 1)])
    assert len(driver.runner.input_batch._free_rows) == num_free


def test_the_runner_counts_the_rows_that_it_ran() -> None:
    driver = Driver()
    driver.step(new=[driver.new("a", PROMPT, 1)])
    before = driver.runner.num_computed_tokens
    run(driver, [capture_of(driver, "x", PROMPT, [(36, 1, False)], 1, layers=[3])])
    assert driver.runner.num_computed_tokens - before == 1


# ---- how far a pass runs ----


def test_a_pass_that_only_reads_is_one_without_tokens_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.step(new=[driver.new("a", PROMPT, 1)])
    layers_run: list[int] = []
    attend = PagedStep.attend
    monkeypatch.setattr(
        PagedStep, "attend", lambda step, layer, *rest: layers_run.append(layer.index) or attend(step, layer, *rest)
    )

    def depth(*captures: CaptureStep, **rest: Any) -> int:
        layers_run.clear()
        run(driver, list(captures), **rest)
        return len(layers_run)

    reads = capture_of(driver, "x", PROMPT, [(3, 1, False)], 1, layers=[1])
    writes = capture_of(driver, "y", OTHER, [(3, 1, False), (20, 1, True)], 5, layers=[1])
    assert depth(reads) == 1
    assert depth(reads, writes) == 3
    assert depth(reads, new=[driver.new("b", OTHER, 9)]) == 3
    assert depth(capture_of(driver, "z", PROMPT, [(3, 1, False)], 1, layers=[4])) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shorter_pass_changes_no_state(backend: str) -> None:
    driver = Driver(backend=backend)
    driver.step(new=[driver.new("a", PROMPT, 1)])
    spans = [(4, 2, False), (36, 1, False)]
    whole = states(run(driver, [capture_of(driver, "x", PROMPT, spans, 1)]), "x")
    for highest in ALL_LAYERS:
        layers = range(highest + 1)
        found = states(run(driver, [capture_of(driver, "x", PROMPT, spans, 1, layers=layers)]), "x")
        np.testing.assert_array_equal(found, whole[: highest + 1])


@pytest.mark.parametrize(("layers", "expected"), [([0], 0), ([1, 0], 1), ([3], None), ([4], None), ([2, 4], None)])
def test_so_many_layers_have_to_run(layers: list[int], expected: int | None) -> None:
    step = CaptureStep("x", [1], [(0, 1, False)], ([1],), [0], layers, "float32")
    wanted = [reader.wanted for reader in readers_of([step])]
    ones = np.ones(1, np.int64)
    assert ProgramStep(StepBatch([], ones, ones, ones, np.array([True])), wanted).num_layers == expected
    assert ProgramStep(StepBatch([], ones, ones, ones, np.array([False])), wanted).num_layers is None, (
        "its keys and values are written"
    )


# ---- the parts ----


def test_spans_become_rows_with_their_positions_and_tables() -> None:
    driver = Driver(TWO_GROUPS)
    rows = driver.runner.input_batch
    x = capture_of(driver, "x", PROMPT, [(3, 2, False), (30, 7, True)], 1)
    y = capture_of(driver, "y", OTHER, [(0, 1, False)], 5)
    spans = lay_out_spans(rows, [x, y])
    assert (spans.counts, spans.written) == ([2, 7, 1], [False, True, False])
    assert rows.num_computed[spans.rows].tolist() == [3, 30, 0]
    first, second, third = spans.rows.tolist()
    assert rows.token_ids[first, 3:5].tolist() == PROMPT[3:5] and rows.token_ids[second, 30:37].tolist() == PROMPT[30:]
    assert rows.block_tables[1][second, :4].tolist() == [11, 12, 13, 14] == rows.block_tables[1][first, :4].tolist()
    assert rows.block_tables[0][third, :4].tolist() == [5, 6, 7, 0]
    rows.give_back(spans.rows)
    assert not rows.block_tables[0].any() and not rows.block_tables[1].any()


def batch_of(plan: SchedulerOutput, counts: list[int]) -> StepBatch:
    ids = list(plan.num_scheduled_tokens)
    return StepBatch(ids, np.arange(len(counts)), np.array(counts), np.cumsum(counts), None)


def readers_of(captures: list[CaptureStep], num_tokens_before: int = 0) -> list[CaptureReader]:
    """Of a model with three layers, in a step whose branches have so many tokens."""
    branches = {"branch": num_tokens_before} if num_tokens_before else {}
    plan = SchedulerOutput(num_scheduled_tokens=branches, captures=captures)
    counts = [*branches.values(), *(count for capture in captures for _, count, _ in capture.spans)]
    layout = StepLayout(plan, batch_of(plan, counts))
    return list(CaptureReaders(3).readers(plan, layout, ModelRunnerOutput()))


def test_the_layout_says_where_the_rows_of_each_kind_are() -> None:
    def capture(name: str, spans: list[tuple[int, int, bool]], captured: list[int]) -> CaptureStep:
        return CaptureStep(name, [1] * sum(count for _, count, _ in spans), spans, ([1],), captured, [0], "float32")

    x, none, y = [(0, 2, False), (7, 3, True)], [(0, 3, True)], [(9, 2, True)]
    captures = [capture("x", x, [0, 4]), capture("none", none, []), capture("y", y, [1])]
    beams = [BeamStep("s", 2, scores=[0.0] * 2), BeamStep("b", scores=[0.0]), BeamStep("t", 1, scores=[0.0] * 3)]
    plan = SchedulerOutput(num_scheduled_tokens={"a": 4, "b": 1}, beam_steps=beams, captures=captures)
    counts = [4, 1, 2, 2, 1, 1, 1, 2, 3, 3, 2]
    layout = StepLayout(plan, batch_of(plan, counts))
    assert [layout.last_row(name) for name in ("a", "b")] == [3, 4]
    assert layout.beam_last_rows == {"s": [6, 8], "t": [9, 10, 11]}
    assert layout.capture_rows == [range(12, 17), range(17, 20), range(20, 22)]
    (reader,) = CaptureReaders(3).readers(plan, layout, ModelRunnerOutput())
    assert reader.wanted.rows.tolist() == [12, 16, 21]
    plan.captures.insert(1, CaptureStep("of a", [], [], (), [0, 3], [0], "float32", branch_id="a"))
    assert layout.capture_rows == [range(12, 17), range(4), range(17, 20), range(20, 22)]


class Collected:
    """A reader of rows of another kind."""

    def __init__(self, end: Any, rows: list[int]) -> None:
        self.wanted = EndRows(end, np.array(rows))
        self.found: list[float] = []

    def read(self, result: Any, output: ModelRunnerOutput) -> None:
        self.found = (result.normed if isinstance(result, FinalStates) else result)[:, 0].tolist()


class NumberedRows:
    """A model of three layers whose numbers name their layer and row, so that a mix-up shows."""

    config = SimpleNamespace(causal=True)
    stage = Stage()

    def forward(
        self, ids: torch.Tensor, positions: Any, step: Any, rows: torch.Tensor, observers: list[Any], *rest: None
    ) -> FinalStates:
        def stream(layer: int, rows: torch.Tensor) -> torch.Tensor:
            return (100.0 * layer + rows)[:, None]

        every = torch.arange(len(ids))
        for observer in observers:
            observer.observe(0, stream(0, every), None)
            for layer in (1, 2):  # what is still to be added counts
                observer.observe(layer, stream(layer, every) - 7.0, torch.full((len(ids), 1), 7.0))
        return FinalStates(stream(3, rows), stream(4, rows))

    def compute_logits(self, normed: torch.Tensor, adapters: object = None) -> torch.Tensor:
        return normed + 500.0


def test_what_is_computed_goes_to_those_who_asked_for_it() -> None:
    def step(name: str, layers: list[int]) -> CaptureStep:
        return CaptureStep(name, [1] * 3, [(0, 3, True)], ([1],), [0, 2], layers, "float32")

    captures = readers_of([step("late", [4, 1]), step("early", [1, 0]), step("end", [3])], num_tokens_before=2)
    others = [Collected(States(), [1]), Collected(Logits(), [0, 1]), Collected(Logits(), [1])]
    readers: list[RowReader] = sorted([*captures, *others], key=lambda reader: reader.wanted.end.rank)
    program = StepProgram(NumberedRows(), SimpleNamespace(backends=[]))  # type: ignore[arg-type]
    inputs: Any = SimpleNamespace(
        adapters=None,
        input_ids=torch.zeros(11),
        positions=None,
        rope_positions=None,
        groups=[],
        cross=None,
        embeddings=None,
    )
    ends = ProgramEnds.of([one.wanted.end for one in readers], [len(one.wanted.rows) for one in readers])
    rows = torch.from_numpy(np.concatenate([one.wanted.rows for one in readers]))
    assert (ends.num_with_logits, ends.num_with_states, len(rows)) == (3, 8, 10)
    output = ModelRunnerOutput()
    ExecutedPass(readers, program.run(inputs, ends, rows, [HOST_COLUMNS] * len(readers))).read(output)
    assert {name: states(output, name)[:, :, 0].tolist() for name in output.hidden_states} == {
        "late": [[402.0, 404.0], [102.0, 104.0]],
        "early": [[105.0, 107.0], [5.0, 7.0]],
        "end": [[308.0, 310.0]],
    }
    assert [other.found for other in others] == [[401.0], [900.0, 901.0], [901.0]]


def test_the_stream_is_not_changed_by_taking_rows_out_of_it() -> None:
    observer = LayerRows([([1], torch.tensor([0, 1]))])
    stream, update = torch.ones(2, 4), torch.full((2, 4), 2.0)
    observer.observe(1, stream, update)
    stream += update  # as the next layer does
    nothing = FinalStates(stream[:0], stream[:0])
    found = InnerLayers.of((1,), 3).run(ProgramRows(nothing, None, observer.found[0], HOST_COLUMNS))
    assert (found == 3.0).all() and (update == 2.0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_wire_has_the_bytes_of_each_extraction(dtype: str, num_layers: int) -> None:
    states = torch.randn(num_layers, 5, 4, generator=torch.Generator().manual_seed(0))
    steps = [CaptureStep(name, [], [], ([1],), [], [0] * num_layers, dtype) for name in "xy"]
    captured = [CapturedRows(steps[0], [0, 1, 2]), CapturedRows(steps[1], [3, 4])]
    output = ModelRunnerOutput()
    assert CaptureReader(captured, InnerLayers.of((0,) * num_layers, 3), dtype).read(states, output) is None
    expected = states.to(getattr(torch, dtype)).split([3, 2], dim=1)
    for name, part in zip("xy", expected):
        wire = output.hidden_states[name]
        assert (wire.dtype, wire.shape) == (dtype, tuple(part.shape))
        back = torch.frombuffer(bytearray(wire.data), dtype=part.dtype).reshape(part.shape)
        assert torch.equal(back, part)
