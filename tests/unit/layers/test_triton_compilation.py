"""Kernels of sampling compile for a GPU, on machines without one: the interpreter accepts programs that the compiler
does not (a variable whose shape changes in a loop, for one)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

POINTERS = {
    "*fp32": (
        "temperature",
        "min_p",
        "maxima",
        "sums",
        "of_groups",
        "listed",
        "peaks",
        "log_sums",
        "scores",
        "weights",
    ),
    "*fp64": ("top_p", "uniforms", "masses"),
    "*i64": ("top_k", "token_ids", "starts", "stops", "best", "best_groups", "keys", "rows", "states"),
    "*i32": ("threshold", "places", "listed_ids", "larger"),
    "*i16": ("occurred",),
    "*i1": ("bad",),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}
TYPES |= {"peak_of_row": "*fp32", "log_sum_of_row": "*fp32", "row_stride": "i64"}
CHUNKS = {"CHUNK": 4096, "CHUNKS": 64}
KERNELS = [
    ("sampling._reduce_chunks", "*bf16", 4, {"DRAWS": True, "FILTERS": True, "CHUNK": 4096, "GROUP": 32}),
    ("sampling._reduce_chunks", "*fp32", 4, {"DRAWS": False, "FILTERS": False, "CHUNK": 4096, "GROUP": 32}),
    ("sampling._draw_from_list", "*bf16", 8, {
        "CHUNKS": 64, "GROUP": 32, "GROUPS": 8192, "WANTED": 256, "GROUP_ROOM": 512, "LIST_ROOM": 1024, "AT_ONCE": 128,
    }),
    ("sampling._find_threshold", "*bf16", 8, {
        "num_columns": 151936, "CHUNKS": 64, "BLOCK": 2048, "PIVOTS": 8, "LIST_ROOM": 1024,
    }),
    ("sampling._sum_kept", "*bf16", 4, CHUNKS),
    ("sampling._pick", "*bf16", 8, {"DRAWS": True, "FILTERS": True, **CHUNKS}),
    ("top._reduce_groups", "*bf16", 4, {"WITH_SUMS": True, "GROUPS": 16, "GROUP": 256}),
    ("top._merge_parts", "*bf16", 1, {"PARTS": 64}),
    ("top._rank_groups", "*bf16", 8, {"SEGMENT": 4096, "WIDTH": 64}),
    ("top._rank_tokens", "*bf16", 8, {"GROUPS": 16, "GROUP": 256, "WIDTH": 64}),
    ("top._rank_keys", "*bf16", 8, {"SEGMENT": 512, "WIDTH": 64}),
    ("top._count_larger", "*bf16", 4, {"CHUNK": 4096}),
    ("penalties._apply", "*fp32", 4, {"CHUNK": 2048}),
    ("penalties._count", "*fp32", 1, {}),
]  # fmt: skip


def compile_all() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ratoon.layers.triton import penalties, sampling, top

    modules = {"sampling": sampling, "top": top, "penalties": penalties}
    for name, logits, num_warps, constants in KERNELS:
        module, kernel = name.split(".")
        function = getattr(modules[module], kernel)
        types = {**TYPES, "logits": logits, **dict.fromkeys(constants, "constexpr")}
        signature = {argument: types.get(argument, "i32") for argument in function.arg_names}
        places = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
        source = ASTSource(function, signature, places)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        print("compiled", name)


@pytest.mark.slow
def test_kernels_of_sampling_compile_for_a_gpu():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    program = [sys.executable, "-m", "tests.unit.layers.test_triton_compilation"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") == len(KERNELS)


if __name__ == "__main__":
    compile_all()
