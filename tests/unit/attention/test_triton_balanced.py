"""Many requests of one token, whose keys are divided evenly among programs: on a GPU where there is one, otherwise
under Triton's interpreter on the CPU (tests/conftest.py).

Sizes are small because the interpreter is slow; tests/cuda has real ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention import triton_balanced
from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.attention.triton_balanced import Balance, serves
from ratoon.layers.attention import AttentionLayer
from tests.triton_interpreter import repair_interpreter
from tests.unit.attention.test_backends import BIAS, SINKS

pytestmark = pytest.mark.slow  # Triton's interpreter

Tensor = torch.Tensor
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPED = AttentionLayer(0, 4, 2, 16, 0.25)

repair_interpreter()


def make_inputs(lengths: list[int], query_lens: list[int], block_size: int, is_padded: bool) -> CommonAttentionMetadata:
    """Blocks in any order; the null block stands for those that a table has no more."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = iter((np.random.default_rng(0).permutation(sum(counts)) + 1).tolist())
    tables = np.zeros((len(lengths), max(counts) + 2), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [next(blocks) for _ in range(count)]
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    seq_lens = np.array(lengths, np.int32)
    # Behind the last length there is something else, as in a runner's memory.
    on_device = torch.tensor([*lengths, 2**30], dtype=torch.int32, device=DEVICE)[:-1]
    return CommonAttentionMetadata(
        starts, seq_lens, tables, torch.from_numpy(starts).to(DEVICE), on_device,
        torch.from_numpy(tables).to(DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE), block_size,
        max(query_lens), max(lengths), is_padded=is_padded,
    )  # fmt: skip


def exact(layer: AttentionLayer, q: Tensor, pages: Tensor, inputs: CommonAttentionMetadata) -> Tensor:
    """Requests of one token, in float64; rows of others are zeros."""
    out = torch.zeros(q.shape[0], layer.num_heads, layer.head_dim, dtype=torch.float64)
    for row, length in enumerate(inputs.seq_lens.tolist()):
        token, behind = inputs.query_start_loc[row : row + 2].tolist()
        if behind - token != 1:
            continue
        first = 0 if layer.window is None else max(0, length - layer.window)
        blocks = torch.from_numpy(inputs.block_table[row, : -(-length // inputs.block_size)]).long()
        kept = pages.cpu().to(torch.float64)[blocks].permute(1, 0, 3, 2, 4).flatten(1, 2)  # [2, keys, kv_heads, D]
        keys, values = kept[:, first:length].repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=2)
        scores = torch.einsum("hd,khd->hk", q[token].cpu().double(), keys) * layer.scale
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.cpu().double()[:, None]), 1)
        out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(keys)], values)
    return out.flatten(1)


def assert_exact(
    layer: AttentionLayer,
    lengths: list[int],
    balance: Balance,
    query_lens: list[int] | None = None,
    block_size: int = 16,
    kv_dtype: torch.dtype = torch.float16,
    is_padded: bool = False,
) -> None:
    torch.manual_seed(0)
    inputs = make_inputs(lengths, query_lens or [1] * len(lengths), block_size, is_padded)
    num_tokens = int(inputs.query_start_loc[-1])
    q = torch.randn(num_tokens, layer.num_heads, layer.head_dim).half().to(DEVICE)
    shape = (int(inputs.block_table.max()) + 1, 2, layer.num_kv_heads, block_size, layer.head_dim)
    pages = torch.randn(shape).to(kv_dtype)
    pages[0] = float("nan")
    for row, length in enumerate(lengths):  # what was not written, or is before a window, must not count
        begin = 0 if layer.window is None else max(0, length - layer.window)
        for key in (
            *range(begin // block_size * block_size, begin),
            *range(length, -(-length // block_size) * block_size),
        ):
            pages[int(inputs.block_table[row, key // block_size]), :, :, key % block_size] = float("nan")
    backend = TritonAttentionBackend(balance=balance, cascade=False)
    out = backend.attend(layer, q, (pages.to(DEVICE),), backend.build_metadata(inputs))
    is_one = np.repeat(np.diff(inputs.query_start_loc) == 1, np.diff(inputs.query_start_loc))
    expected = exact(layer, q, pages, inputs)
    torch.testing.assert_close(out.cpu().double()[is_one], expected[is_one], rtol=0, atol=4e-3)


@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ([131, 61, 1, 2, 18, 32], None),
        ([32, 33, 34, 64, 65, 5], 20),  # windows that begin inside a tile and at its borders
        ([3, 300], 200),  # the last one is cut
        ([300, 4, 4], None),  # one that is cut among most programs
        ([1], None),  # fewer tiles than programs
    ],
    ids=["mixed", "window", "window and cut", "one long", "one key"],
)
@pytest.mark.one_in(3)
def test_requests_that_are_cut_anywhere_are_exact(lengths: list[int], window: int | None, block_n: int) -> None:
    assert_exact(replace(GROUPED, window=window), lengths, Balance(block_n, 3, 1))


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn], ids=["16 bits", "fp8"])
def test_sinks_are_in_each_sum_once_wherever_requests_are_cut(kv_dtype: torch.dtype) -> None:
    """Some requests are one program's, some are cut; heads of both KV heads have sinks of their own."""
    layer = replace(GROUPED, num_heads=8, head_dim=32, sinks=SINKS.to(DEVICE))
    assert_exact(layer, [131, 61, 1, 18, 32], Balance(16, 3, 1), kv_dtype=kv_dtype)
    assert_exact(replace(layer, window=20), [32, 300, 5], Balance(16, 3, 1), kv_dtype=kv_dtype)


def test_requests_of_other_lengths_and_padding_have_no_tiles() -> None:
    """Requests without tokens stand at the end and between others."""
    assert_exact(GROUPED, [20, 40, 1, 33, 1, 1], Balance(16, 3, 1), [0, 1, 1, 1, 0, 0], is_padded=True)
    assert_exact(GROUPED, [40, 35, 20], Balance(16, 3, 1), [1, 35, 1])


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_pages_may_be_larger_and_smaller_than_tiles(block_size: int) -> None:
    layer = replace(GROUPED, num_heads=2, num_kv_heads=1)
    assert_exact(layer, [70, 64, 3, 129], Balance(32, 3, 1), block_size=block_size)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.one_in(3)
def test_heads_of_a_kv_head(group: int, kv_dtype: torch.dtype) -> None:
    layer = replace(GROUPED, num_heads=2 * group, head_dim=64, scale=0.125, window=50)
    assert_exact(layer, [70, 130, 3], Balance(64, 3, 1), kv_dtype=kv_dtype)


def test_a_request_does_not_spoil_the_one_behind_it() -> None:
    """A program goes from one to the other with what it has summed."""
    torch.manual_seed(0)
    inputs = make_inputs([40, 33, 50], [1, 1, 1], 16, False)
    q = torch.randn(3, 2, 16).half().to(DEVICE)
    pages = torch.randn(int(inputs.block_table.max()) + 1, 2, 1, 16, 16).half()
    layer = replace(GROUPED, num_heads=2, num_kv_heads=1)
    expected = exact(layer, q, pages, inputs)
    pages[int(inputs.block_table[0, 0]), 0, :, 3] = float("inf")
    pages[int(inputs.block_table[1, 0]), 1, :, 3] = float("nan")
    backend = TritonAttentionBackend(balance=Balance(16, 3, 1), cascade=False)
    out = backend.attend(layer, q, (pages.to(DEVICE),), backend.build_metadata(inputs)).cpu().double()
    assert not out[:2].isfinite().all(1).any()
    torch.testing.assert_close(out[2], expected[2], rtol=0, atol=4e-3)


def test_more_tiles_than_a_plan_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of lengths counts, which may be far above them: another kernel attends."""
    monkeypatch.setattr(triton_balanced, "_MAX_TILES", 5)
    assert_exact(GROUPED, [40, 33, 50], Balance(16, 3, 1))


@pytest.mark.parametrize("block_n", [16, 32])
def test_keys_and_values_in_fp8(block_n: int) -> None:
    layer = replace(GROUPED, num_heads=3, num_kv_heads=1, head_dim=32)
    assert_exact(layer, [50, 64, 3], Balance(block_n, 3, 1), kv_dtype=torch.float8_e4m3fn)


def test_what_the_kernel_serves() -> None:
    pages = torch.zeros(3, 2, 2, 16, 64, dtype=torch.bfloat16)
    layer = AttentionLayer(0, 4, 2, 64, 0.125)
    assert serves(layer, torch.bfloat16, pages, 16, 16)
    assert serves(layer, torch.bfloat16, pages.to(torch.float8_e4m3fn), 16, 32)
    assert not serves(layer, torch.float32, pages.float(), 16, 16)
    assert not serves(replace(layer, head_dim=80), torch.bfloat16, pages, 16, 16)
    small = torch.zeros(3, 2, 2, 16, 16, dtype=torch.bfloat16)
    assert serves(replace(layer, head_dim=16), torch.bfloat16, small, 16, 16)
    assert not serves(replace(layer, head_dim=16), torch.bfloat16, small.to(torch.float8_e4m3fn), 16, 32)
    assert not serves(replace(layer, causal=False), torch.bfloat16, pages, 16, 16)
    assert not serves(replace(layer, bias=BIAS), torch.bfloat16, pages, 16, 16)
    assert not serves(replace(layer, num_heads=32), torch.bfloat16, pages, 16, 16)  # 16 for a KV head
    assert not serves(layer, torch.bfloat16, pages, 24, 16)
    assert serves(layer, torch.bfloat16, pages, 8, 16)
    assert serves(layer, torch.bfloat16, pages, 64, 16)
