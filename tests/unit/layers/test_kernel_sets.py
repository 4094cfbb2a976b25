"""Which kernels are used: the best set that the processor can run, or the one that RATOON_KERNELS names.

Every set that this processor can run must give right numbers, not only the best one: the tests of the kernels run again
in a process of their own for each of the others.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ratoon.core.errors import ConfigError
from ratoon.execution.choices import choose_ops, open_kernel_choices
from ratoon.layers import native
from ratoon.layers.native.sources import digest_of

TESTS = Path(__file__).parents[1]
ACCURACY_TESTS = ["layers/test_kernel_accuracy.py", "attention/test_attention_accuracy.py"]
OTHER_TESTS = [
    "layers/test_native_ops.py", "layers/test_quantised.py", "layers/test_encoder_layers.py",
    "attention/test_backends.py",
]  # fmt: skip
OTHER_SETS = [name for name in native._supported_sets() if name != native.kernel_set_name()]
LEAST_SET = OTHER_SETS[-1:]  # whose code has least in common with that of the best one


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_SETS, reason="this processor runs one kernel set")
@pytest.mark.parametrize(
    "kernel_set", [pytest.param(name, marks=() if name in LEAST_SET else pytest.mark.full) for name in OTHER_SETS]
)
@pytest.mark.parametrize(
    "files",
    [pytest.param(ACCURACY_TESTS, id="accuracy"), pytest.param(OTHER_TESTS, id="others", marks=pytest.mark.full)],
)
def test_a_set_that_is_not_the_best_one_passes_the_same_tests(kernel_set: str, files: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:schemathesis",
        *(str(TESTS / name) for name in files),
    ]
    environment = {**os.environ, native.VARIABLE: kernel_set, "PYTEST_ADDOPTS": "", "RATOON_TESTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(native.library() is None, reason="no kernels for this processor; `make setup` builds them")
def test_a_library_that_was_built_from_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = native.kernel_set_name()
    assert native._load(name) is not None and not caplog.messages
    monkeypatch.setattr(native, "digest_of", lambda folder: "another")
    assert native._load(name) is None
    (message,) = caplog.messages
    assert "was built from other sources; install the package again" in message
    monkeypatch.setattr(native, "digest_of", lambda folder: "")  # no sources: a wheel's library is its own
    assert native._load(name) is not None


def test_every_byte_of_the_sources_counts(tmp_path: Path) -> None:
    digests = {digest_of(tmp_path)}
    for name, content in [("a.c", "1"), ("a.c", "2"), ("b.h", ""), ("b.h", "2"), ("c.c", "")]:
        (tmp_path / name).write_text(content)
        digests.add(digest_of(tmp_path))
    (tmp_path / "notes.txt").write_text("of no library")
    digests.add(digest_of(tmp_path))
    assert len(digests) == 6 and "" in digests


def test_a_set_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_supported_sets", lambda: ["avx512", "avx2"])
    for value, expected in {"": ["avx512", "avx2"], "auto": ["avx512", "avx2"], "avx2": ["avx2"], "none": []}.items():
        monkeypatch.setenv(native.VARIABLE, value)
        assert native._wanted_sets() == expected


@pytest.mark.parametrize(("value", "words"), [("neon", "can't run neon"), ("sse", "'sse' is unknown")])
def test_a_set_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setattr(native, "_supported_sets", lambda: ["avx512", "avx2"])
    monkeypatch.setenv(native.VARIABLE, value)
    with pytest.raises(ConfigError, match=words):
        native._wanted_sets()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2 fma f16c bmi2", ["avx2"]),
        ("avx512f avx512bw avx512cd avx512dq avx512vl", ["avx512"]),
        ("avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni amx_tile", ["avx512vnni", "avx512"]),
        (
            "avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni amx_tile amx_int8",
            ["avx512amx", "avx512vnni", "avx512"],
        ),
        ("sse2", []),
    ],
)
def test_sets_are_those_whose_instructions_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: list[str]
) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: set(flags.split()))
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    assert native._supported_sets() == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fp asimd", ["neon"]),
        ("fp asimd asimddp", ["neondot", "neon"]),
        ("fp asimd asimddp i8mm", ["neoni8mm", "neondot", "neon"]),
    ],
)
def test_sets_of_arm_follow_its_dot_and_matrix_instructions(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: list[str]
) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: set(flags.split()))
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    assert native._supported_sets() == expected


@pytest.mark.parametrize(
    ("variable", "flags", "words"),
    [
        ("none", "avx2 fma f16c bmi2", "RATOON_KERNELS is none"),
        ("auto", "sse2", "this processor has not the instructions that the kernels need"),
        ("auto", "avx2 fma f16c bmi2", "no kernels were built for this processor"),
    ],
)
def test_one_line_says_why_a_processor_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, flags: str, words: str
) -> None:
    monkeypatch.setenv(native.VARIABLE, variable)
    monkeypatch.setattr(native, "cpu_flags", lambda: set(flags.split()))
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "_found", lambda: ("none", None))
    ops = choose_ops(torch.device("cpu"), torch.float32, kernels=open_kernel_choices(True, 2))
    assert ops.name == "torch"
    (message,) = caplog.messages
    assert words in message


@pytest.mark.skipif(native.library() is None, reason="no kernels for this processor; `make setup` builds them")
def test_a_set_that_the_system_refuses_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(ratoon_kernels_usable=lambda: 0)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: refused)
    assert native._load(native.kernel_set_name()) is None
