"""How products are cut where a row must have the same bits in any batch: by the weight's shape alone."""

from __future__ import annotations

import pytest

from ratoon.layers.invariant_choices import SEGMENT_STEP, segments_of, wide_of
from ratoon.layers.product_choices import Panel, Stream

SHAPES = [
    (4096, 1024),
    (1024, 2048),
    (1024, 3072),
    (6144, 4096),
    (4096, 14336),
    (151936, 1024),
    (576, 1536),
    (200, 264),
]
SHARED_MEMORY = 232_448


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("kind", ["linear", "gated"])
def test_few_rows_are_cut_as_many_rows_are(kind: str, outputs: int, inputs: int) -> None:
    segments = segments_of(kind, outputs, inputs, "bfloat16")
    assert segments is not None and segments.few[0] is None and len(segments.few) == 65
    assert segments.inputs % SEGMENT_STEP == 0
    span = segments.group * segments.inputs
    assert (segments.groups - 1) * span < inputs <= segments.groups * span
    for rows, choice in enumerate(segments.few[1:], 1):
        if isinstance(choice, Panel):
            assert choice.k_warps == segments.group and choice.splits in (1, segments.groups)
            assert segments.takes_norm == (segments.groups == 1), "the kernels of all numbers of rows can, or none does"
        else:
            assert isinstance(choice, Stream) and choice.splits == segments.groups and segments.group == 1
            assert not segments.takes_norm
            steps = -(-2 * inputs // choice.step_bytes)  # as stream.py divides them
            assert segments.inputs == -(-steps // choice.splits) * choice.step_bytes // 2
            weight_rows = choice.outputs * (2 if kind == "gated" else 1)
            stages = choice.stages * choice.step_bytes * (weight_rows + max(8, 1 << (rows - 1).bit_length()))
            assert choice.stages >= 2 and stages + 2048 <= SHARED_MEMORY


def test_weights_that_the_kernels_can_not_read_are_left_to_tiles_of_one_size() -> None:
    assert segments_of("linear", 64, 1024, "float32") is None
    assert segments_of("linear", 64, 1001, "bfloat16") is None
    assert segments_of("linear", 64, 1024, "float16") is not None


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [65, 128, 200, 256, 512, 8192])
def test_tiles_of_many_rows_fit(outputs: int, inputs: int, rows: int) -> None:
    segments = segments_of("linear", outputs, inputs, "bfloat16")
    assert segments is not None
    tile = wide_of(rows, outputs, segments)
    assert tile.rows == 16 * tile.num_warps or tile.rows == 32 * tile.num_warps
    assert tile.stages * 2 * SEGMENT_STEP * (tile.rows + tile.outputs) + 1024 <= SHARED_MEMORY
    held = 1 + (segments.group > 1) + (segments.groups > 1)
    assert tile.rows * tile.outputs // (32 * tile.num_warps) * held <= 192, "registers of sums"
    if tile.is_shared:
        assert -(-rows // tile.rows) * -(-outputs // tile.outputs) <= -(-outputs // 16), (
            "programs of a tile are counted"
        )


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "is_shared"),
    [
        (4096, 4096, 128, True),
        (4096, 4096, 256, False),
        (4096, 14336, 256, True),
        (1024, 3072, 128, True),
        (4096, 1024, 128, False),
        (4096, 14336, 8192, False),
    ],
)
def test_few_tiles_are_shared_by_programs(outputs: int, inputs: int, rows: int, is_shared: bool) -> None:
    segments = segments_of("linear", outputs, inputs, "bfloat16")
    assert segments is not None and wide_of(rows, outputs, segments).is_shared == is_shared
