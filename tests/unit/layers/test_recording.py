"""Recorded passes: replayed calls compute what the calls themselves would, in the same memory; the arena's memory."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.layers.native import library
from ratoon.layers.native.recording import (
    ALIGNMENT,
    CHUNK_BYTES,
    LARGE_BYTES,
    Arena,
    Program,
    Recording,
    new_bytes,
    new_floats,
)
from ratoon.layers.native_ops import NativeOps

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")


def normed_product(rows: int = 3, width: int = 48):
    """Ops, and a function of x [rows, width] that needs two kernels and memory between them."""
    ops, generator = NativeOps(), torch.Generator().manual_seed(0)
    weight, norm = (torch.randn(size, generator=generator) for size in ((20, width), (width,)))
    product = ops.make_linear(weight, None)
    return torch.randn(rows, width, generator=generator), lambda x: product(ops.rms_norm(x, norm, 1e-5))


def test_a_program_computes_with_what_is_in_memory_when_it_runs():
    x, function = normed_product()
    with Recording(Arena()) as recording:
        y = function(x)
    program = recording.program()
    assert program is not None and len(program) == 2
    assert torch.equal(y, function(x))
    x.copy_(torch.randn(x.shape))
    assert not torch.equal(y, function(x))
    program.run()
    assert torch.equal(y, function(x))


def test_all_kernels_of_a_pass_have_a_form_that_can_be_recorded():
    kernels = library()
    assert kernels is not None
    setup = {"sources", "set_threads", "packed_size", "pack_weight", "packed_size_16", "pack_weight_16"}
    setup |= {
        "quantised_scratch",
        "quantised_kernel",
        "repack_codes",
        "repack_halves",
        "fit_scales",
        "encode",
        "run_program",
        "time_program",
        "draw",
        "prepare_decodes",
        "prepare_tables",
        "allow_bits",
        "match_texts",
        "attention_bf16",  # of encoders, whose passes are not recorded
        "attention_bf16_scratch",
        "resize_width",  # of pictures
        "resize_height",
        "read_block",  # of the KV cache, from a file
        "pack_low_rank",  # when an adapter is loaded
        "low_rank_bytes",
        "experts_scratch",  # whose size a pass takes from its number of rows
        "group_bytes",
        "open_group",
        "close_group",
        "all_to_all",  # of steps that are too large to be recorded
    }
    assert kernels.functions.keys() - kernels.words.keys() <= {f"ratoon_{name}" for name in setup}


def test_floats_travel_as_they_are():
    """eps decides the norm of a row of zeros and one small number."""
    ops, x, weight = NativeOps(), torch.tensor([[1e-3, 0.0, 0.0, 0.0]]), torch.ones(4)
    with Recording(Arena()) as recording:
        y = ops.rms_norm(x, weight, 0.3)
    expected = y.clone()
    y.fill_(torch.nan)
    program = recording.program()
    assert program is not None
    program.run()
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("operate", "name"),
    [
        (lambda x: x + 1, "aten.add.Tensor"),
        (lambda x: x.mul_(2), "aten.mul_.Tensor"),
        (lambda x: torch.empty(3), "aten.empty.memory_format"),
        (lambda x: x[:, :2].copy_(x[:, 2:4]), "aten.copy_.default"),
    ],
)
def test_what_torch_computes_can_not_be_replayed(operate, name):
    x, function = normed_product()
    with Recording(Arena()) as recording:
        function(x)
        operate(x)
    assert recording.obstacles == [name]
    assert recording.program() is None


def test_a_kernel_without_a_recordable_form_is_an_obstacle():
    with Recording(Arena()) as recording:
        kernels = library()
        assert kernels is not None
        kernels.ratoon_packed_size(3, 4)
    assert recording.obstacles == ["ratoon_packed_size"]


def test_views_and_plain_copies_are_no_obstacle():
    x, function = normed_product()
    target = torch.zeros(3, 20)
    with Recording(Arena()) as recording:
        y = function(x.view(1, 3, 48)[0])
        target.copy_(y)
    program = recording.program()
    assert program is not None
    target.zero_()
    program.run()
    assert torch.equal(target, function(x))


def test_another_thread_is_not_recorded_and_gets_memory_of_its_own():
    x, function = normed_product()
    results = []
    with Recording(arena := Arena()) as recording:
        thread = threading.Thread(target=lambda: results.append(function(x)))
        thread.start()
        thread.join()
    program = recording.program()
    assert program is not None and len(program) == 0 and arena.num_bytes == 0
    assert torch.equal(results[0], function(x))


def test_after_a_failure_nothing_is_recorded_any_more():
    x, function = normed_product()
    with pytest.raises(ValueError, match="stop"), Recording(Arena()) as recording:
        raise ValueError("stop")
    function(x)
    program = recording.program()
    assert program is not None and len(program) == 0
    with Recording(Arena()) as recording:  # another one can be opened
        function(x)
    assert len(recording.program() or ()) == 2


def test_a_kernel_that_fails_ends_the_program(monkeypatch):
    calls = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
    def call(words):
        calls.append(words[0])
        return -1 if words[0] == 2 else 0

    address = ctypes.cast(call, ctypes.c_void_p).value
    assert address is not None
    kernels = library()
    assert kernels is not None
    monkeypatch.setitem(kernels.words, "ratoon_test", address)
    program = Program(kernels, [("ratoon_test", [number]) for number in (1, 2, 3)])
    for run in (program.run, program.run_timed):
        calls.clear()
        with pytest.raises(MemoryError, match="ran out of memory"):
            run()
        assert calls == [1, 2]


def test_a_timed_program_computes_the_same_and_says_when_each_call_ended():
    x, function = normed_product()
    with Recording(Arena()) as recording:
        y = function(x)
    program = recording.program()
    assert program is not None
    x.copy_(torch.randn(x.shape))
    ends = program.run_timed()
    assert torch.equal(y, function(x))
    assert program.names == ["ratoon_rms_norm", "ratoon_linear"]
    assert len(ends) == 2 and 0 < ends[0] <= ends[1]


# ---- memory ----


def test_memory_is_handed_out_again_once_no_view_of_it_is_left():
    arena = Arena()
    first = arena.take(1000)
    view = first.view(torch.float32)[10:20]
    address = first.data_ptr()
    del first
    gc.collect()
    assert arena.take(1000).data_ptr() != address
    del view
    gc.collect()
    assert arena.take(1000).data_ptr() == address


def test_a_pass_of_many_layers_needs_the_memory_of_one():
    x, function = normed_product(rows=64, width=512)
    with Recording(arena := Arena()):
        for _ in range(50):
            function(x)
    assert arena.num_bytes == CHUNK_BYTES


def test_without_a_recording_small_memory_is_torchs():
    assert new_floats(2, 3).shape == (2, 3) and new_bytes(5).dtype == torch.uint8


def test_without_a_recording_large_memory_is_handed_out_again():
    """The system would clear its pages for every layer of a prompt."""
    used = [new_floats(100, LARGE_BYTES // 100) for _ in range(3)]
    assert len({piece.data_ptr() for piece in used}) == 3
    addresses = {piece.data_ptr() for piece in used}
    used.clear()
    assert new_floats(100, LARGE_BYTES // 100).data_ptr() in addresses
    assert new_bytes(LARGE_BYTES).data_ptr() % ALIGNMENT == 0


def test_ever_longer_prompts_need_little_more_than_the_longest():
    arena = Arena()
    for size in range(CHUNK_BYTES, 9 * CHUNK_BYTES, CHUNK_BYTES // 8):
        arena.take(size)
    assert arena.num_bytes < 4 * 9 * CHUNK_BYTES


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * CHUNK_BYTES // 2), st.booleans()), max_size=30))
def test_pieces_in_use_never_overlap(steps):
    arena, used = Arena(), []
    for number, (size, give_back) in enumerate(steps):
        if give_back and used:
            used.pop(len(used) // 2)
        piece = arena.take(size)
        assert len(piece) == size and (size == 0 or piece.data_ptr() % ALIGNMENT == 0)
        piece.numpy()[:1], piece.numpy()[-1:] = number % 256, number % 256
        used.append((number % 256, piece))
    for number, piece in used:
        assert np.all(piece.numpy()[[0, -1]] == number) if len(piece) else True


def test_recording_does_not_need_the_compiler_of_torch() -> None:
    """torch wraps the method of other modes so that its first call imports torch._dynamo, which takes a second."""
    assert not hasattr(Recording.__torch_dispatch__, "__wrapped__")
