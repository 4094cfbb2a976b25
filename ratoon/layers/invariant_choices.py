"""Which kernels multiply on Hopper where a row's products must have the same bits with any number of rows.

A product's sums are cut into segments of inputs, and these into groups, by the weight's shape alone. Small weights are
multiplied by panels with up to 64 rows, large ones by streams; both cut sums in that way. More rows take tiles of a
size that follows from their number, and from nothing else that could change the bits.
"""

from __future__ import annotations

from typing import NamedTuple

from ratoon.layers.product_choices import (
    MAX_PANEL_NUMBERS,
    MAX_PANEL_ROWS,
    NUM_SMS,
    PANEL_DTYPES,
    PANEL_OUTPUTS,
    PANEL_STEP_BYTES,
    ROW_COUNTS,
    SHARED_BYTES,
    STREAM_ROW_BYTES,
    Choice,
    Panel,
    Stream,
)

SEGMENT_STEP = 64  # inputs: segments are of whole steps of triton/wide.py
STREAM_OUTPUTS = 64  # of a tile
STREAM_STEP_BYTES = 256
MIN_SEGMENT_STEPS = 8  # of a stream
MAX_STREAM_SEGMENTS = 4
SMALL_PANEL_ROWS = 16
WARP_NUMBERS = 32 * 256  # of a weight that a warp's registers hold
ENOUGH_TILES = 96  # to keep a GPU busy
LONG_GROUP = 2048  # inputs: the exchange of sums takes little of the time of such a program


class WideTile(NamedTuple):
    """What one program of triton/wide.py computes: a tile of rows × outputs. `stages` steps are on their way.
    `is_shared`: by several programs, with a group of segments each."""

    rows: int
    outputs: int
    stages: int
    num_warps: int
    is_shared: bool


class Segments(NamedTuple):
    """How the sums of a weight's products are cut: segments of `inputs`, whose sums are added up in `groups`, which are
    added up in turn."""

    inputs: int
    group: int  # segments of one
    groups: int
    few: tuple[Choice, ...]  # the kernel for few rows, by their number
    takes_norm: bool  # the kernels for few rows apply a norm to their sums


def segments_of(kind: str, outputs: int, inputs: int, dtype: str) -> Segments | None:
    """Chooses the segments of a weight [outputs, inputs]. None: it can't be copied in boxes."""
    if PANEL_DTYPES.get(dtype) != 2 or 2 * inputs % STREAM_ROW_BYTES:
        return None
    if panels := panels_for(kind, outputs, inputs):
        small, large = panels
        length = whole_steps(inputs, large.splits * large.k_warps, SEGMENT_STEP)
        groups = -(-inputs // (length * large.k_warps))
        few: list[Choice] = [None]
        few += [small] * SMALL_PANEL_ROWS + [large] * (MAX_PANEL_ROWS - SMALL_PANEL_ROWS)
        return Segments(length, large.k_warps, groups, tuple(few), groups == 1)
    wanted = min(2 * NUM_SMS // -(-outputs // STREAM_OUTPUTS), MAX_STREAM_SEGMENTS)
    most = 2 * inputs // STREAM_STEP_BYTES // MIN_SEGMENT_STEPS
    length = whole_steps(inputs, max(1, min(wanted, most)), STREAM_STEP_BYTES // 2)
    groups = -(-inputs // length)
    few = []
    for rows in ROW_COUNTS:
        choice = stream_of(kind, groups, rows) if rows else None
        few += [choice] * (rows + 1 - len(few))
    return Segments(length, 1, groups, tuple(few), False)


def whole_steps(inputs: int, count: int, step: int) -> int:
    """The length of `count` segments or fewer."""
    return -(-inputs // (count * step)) * step


def panels_for(kind: str, outputs: int, inputs: int) -> tuple[Panel, Panel] | None:
    """Chooses the panels for up to SMALL_PANEL_ROWS rows and for more, if the weight is small: the second one may share
    the sums of a tile among programs, the first one does all of them."""
    if outputs * inputs > MAX_PANEL_NUMBERS or 2 * inputs % PANEL_STEP_BYTES:
        return None
    if kind == "linear" and outputs <= 2048 and inputs > 1024:
        small, large = Panel(16, 8, 1, 1), Panel(32, 8, 1, -(-inputs // 1024))
        return (small, large) if small.outputs * inputs <= small.k_warps * WARP_NUMBERS else None
    tile = 32 if kind == "linear" and outputs > 2048 else 16
    numbers = (2 if kind == "gated" else 1) * tile * inputs
    for warps in (8, 16):
        if numbers <= warps * WARP_NUMBERS:
            return Panel(tile, warps, 1, 1), Panel(tile, warps, 1, 1)
    return None


def stream_of(kind: str, segments: int, rows: int) -> Stream:
    weight_rows = STREAM_OUTPUTS * (2 if kind == "gated" else 1)
    stage = STREAM_STEP_BYTES * (weight_rows + max(8, 1 << (rows - 1).bit_length()))
    room = SHARED_BYTES if kind == "gated" else SHARED_BYTES // 2
    return Stream(STREAM_OUTPUTS, STREAM_STEP_BYTES, room // stage, 4, segments)


def wide_of(rows: int, outputs: int, segments: Segments) -> WideTile:
    """The tile for so many rows."""
    group, groups = segments.group, segments.groups

    def tiles(height: int, width: int) -> int:
        return -(-rows // height) * -(-outputs // width)

    is_whole = group == groups == 1  # no other sums are held
    if is_whole and tiles(128, 256) >= 2 * ENOUGH_TILES:
        return WideTile(128, 256, 4, 8, False)
    if tiles(128, 128) >= ENOUGH_TILES:
        return WideTile(128, 128, 3 if is_whole else 6, 8, False)
    num_counters = -(-outputs // PANEL_OUTPUTS)  # of programs that share a tile
    if rows > 128 and groups > 1 and group * segments.inputs >= LONG_GROUP and tiles(128, 128) <= num_counters:
        return WideTile(128, 128, 6, 8, True)
    height, num_warps = (64, 4) if group > 1 else (128, 8)
    is_shared = groups > 1 and tiles(height, 64) < min(ENOUGH_TILES, num_counters + 1)
    return WideTile(height, 64, 6 if height == 64 else 4, num_warps, is_shared)
