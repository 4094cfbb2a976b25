"""Which kernel multiplies how many rows: what is measured, and the file that keeps it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.machine import cache_folder
from ratoon.layers import native, native_measurement
from ratoon.layers.native_choices import (
    MATRICES,
    MOST_BYTES,
    NEVER,
    UNPACKED,
    KernelChoices,
    Machine,
    RowCounts,
    WeightShape,
    choices_file,
    read_choices,
    this_machine,
    write_choices,
)
from ratoon.layers.native_formats import PackedWeight, QuantisedLinear
from ratoon.layers.native_measurement import (
    ROW_COUNTS,
    WHOLE_STRIPS,
    ProductTimer,
    choose_row_counts,
    counts_for,
    is_steady,
    kernel_of,
    kernels_for,
    measure_kernels,
    time_kernels,
)
from tests.unit.layers.test_quantised import FORMS, random, random_groups

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no kernels for this processor")

MACHINE = Machine("A processor", "0123456789abcdef", "avx2", "fedcba", 2)
SHAPE, OTHER = WeightShape(4, 32, True, 576, 3072), WeightShape(8, 16, False, 1536, 576)
MEASURED = {SHAPE: RowCounts(9, 32), OTHER: RowCounts(97, NEVER)}


# ---- the file ----


def test_what_is_kept_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "deep" / "choices.json"
    assert read_choices(file, MACHINE) == {}
    write_choices(file, MACHINE, {SHAPE: MEASURED[SHAPE]})
    write_choices(file, MACHINE, {OTHER: MEASURED[OTHER]})  # added to what is there
    assert read_choices(file, MACHINE) == MEASURED
    assert [path.name for path in file.parent.iterdir()] == ["choices.json"] and not caplog.messages


def changed(**fields: Any) -> Callable[[Path], None]:
    """A file of another machine, which is whole."""
    return lambda file: write_choices(file, MACHINE._replace(**fields), MEASURED)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another processor": (changed(features="another"), "was measured on another processor"),
    "other kernels": (changed(kernels="avx512"), "was measured with other kernels"),
    "another version of the kernels": (changed(sources="another"), "was measured with another version of the kernels"),
    "other threads": (changed(num_threads=3), "was measured with another number of threads"),
    "another format": (edited(lambda content: content.update(version=0)), "is of another version"),
    "half written": (lambda file: file.write_bytes(file.read_bytes()[:-40]), "is damaged"),
    "empty": (lambda file: file.write_bytes(b""), "is damaged"),
    "other bytes": (lambda file: file.write_bytes(bytes(range(256))), "is damaged"),
    "deep": (lambda file: file.write_text("[" * 100_000), "is damaged"),
    "a list": (lambda file: file.write_text("[]"), "is damaged"),
    "a changed number": (edited(lambda content: content["weights"][0].__setitem__(5, 11)), "is damaged"),
    "too large": (lambda file: file.write_bytes(b" " * (MOST_BYTES + 1)), "is too large"),
    "a folder": (as_folder, "irectory"),
    "a pipe": (as_pipe, "is no file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_does_not_fit_is_one_line_in_the_log(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harm, words = BAD_FILES[name]
    caplog.set_level("INFO", "ratoon.layers.native_choices")
    file = tmp_path / "choices.json"
    write_choices(file, MACHINE, MEASURED)
    harm(file)
    assert read_choices(file, MACHINE) == {}
    (record,) = caplog.records
    message = record.getMessage()
    assert words in message and str(file) in message and "measured again" in message
    assert (record.levelname == "INFO") == ("another version" in message), "an update is nothing to warn of"


@pytest.mark.parametrize(
    "entry",
    [
        [5, 32, 1, 576, 960, 9, 9], [4, 64, 1, 576, 960, 9, 9], [4, 32, 2, 576, 960, 9, 9], [4, 32, 1, 0, 960, 9, 9],
        [4, 32, 1, 576, 960, -1, 9], [4, 32, 1, 576, 960, 9, NEVER + 1], [4, 32, 1, 576, 960, 9],
        [4, 32, 1, 576, 960, 9, 9.5], [4, 32, True, 576, 960, 9, 9], "4 32 1 576 960 9 9", None,
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused_also_with_a_right_checksum(
    entry: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ratoon.layers.native_choices import VERSION, _checksum

    content = {"version": VERSION, "machine": MACHINE._asdict(), "weights": [entry]}
    file = tmp_path / "choices.json"
    file.write_text(json.dumps({**content, "checksum": _checksum(content)}))
    assert read_choices(file, MACHINE) == {} and len(caplog.messages) == 1


@given(data=st.data())
def test_a_damaged_file_never_gives_numbers_that_were_not_measured(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    write_choices(file, MACHINE, MEASURED)
    content = bytearray(file.read_bytes())
    first = data.draw(st.integers(0, len(content)))
    last = data.draw(st.integers(first, min(len(content), first + 9)))
    content[first:last] = data.draw(st.binary(max_size=9))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    assert read_choices(file, MACHINE) in ({}, MEASURED)


def test_a_folder_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    write_choices(tmp_path / "file" / "choices.json", MACHINE, MEASURED)
    (message,) = caplog.messages
    assert "is not kept" in message and "next start" in message


def test_a_file_that_is_not_whole_is_never_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "choices.json"
    write_choices(file, MACHINE, MEASURED)
    before = file.read_bytes()

    def fail(self: Path, text: str) -> None:
        Path.write_bytes(self, text.encode()[:9])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", fail)
    write_choices(file, MACHINE, {SHAPE: RowCounts()})
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_the_cache_folder_follows_the_users_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("RATOON_CACHE_ROOT", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.delenv("RATOON_CACHE_ROOT")
    assert cache_folder() == Path("/caches/ratoon")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification has ignored
    assert cache_folder() == Path("/home/user/.cache/ratoon")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    assert cache_folder().is_absolute()


@needs_kernels
def test_machines_have_files_of_their_own() -> None:
    machine = this_machine(3)
    assert machine.num_threads == 3 and machine.kernels == native.kernel_set_name() and len(machine.sources) >= 7
    others = [machine._replace(features="f"), machine._replace(num_threads=4), machine._replace(kernels="neon")]
    assert len({choices_file(one) for one in [machine, *others]}) == 4
    assert choices_file(machine._replace(sources="newer")) == choices_file(machine)  # which replaces the older one
    assert choices_file(machine._replace(processor="A/../B (R)")).parent == cache_folder()


# ---- the choice ----


DEFAULT = RowCounts(9, 9)


def times_of(seconds: Callable[[int, int], float], has_matrices: bool = True) -> dict[int, dict[int, float]]:
    return {rows: {kernel: seconds(rows, kernel) for kernel in kernels_for(rows, has_matrices)} for rows in ROW_COUNTS}


def test_the_kernel_that_is_faster_from_some_rows_on_is_taken_from_there() -> None:
    times = times_of(lambda rows, kernel: [rows, 13 + rows / 4, 99, 99][kernel])
    assert choose_row_counts(times, DEFAULT) == RowCounts(24, NEVER)
    times = times_of(lambda rows, kernel: [rows, 1000, 8.5, 8.5][kernel])
    assert choose_row_counts(times, RowCounts(NEVER, NEVER)).matrices_from == 9


def test_the_matrix_unit_takes_as_many_rows_of_a_strip_as_pay() -> None:
    """A strip costs as much as 13 rows in registers, whether it is full or not."""

    def seconds(rows: int, kernel: int) -> float:
        strips, rest = divmod(rows, 16)
        return [rows, 1000, 13 * -(-rows // 16), 13 * strips + rest][kernel]

    assert choose_row_counts(times_of(seconds), DEFAULT).matrices_from == 16
    assert choose_row_counts(times_of(seconds), RowCounts(12, 12)) == RowCounts()  # which gains too little


def test_a_small_gain_or_none_leaves_the_default() -> None:
    assert choose_row_counts(times_of(lambda rows, kernel: 1 + 0.01 * kernel), DEFAULT) == RowCounts()
    assert choose_row_counts(times_of(lambda rows, kernel: 9 if kernel == UNPACKED else 1), DEFAULT) == RowCounts()


def test_without_a_matrix_unit_there_are_two_kernels() -> None:
    times = times_of(lambda rows, kernel: [rows, 20][kernel], has_matrices=False)
    assert choose_row_counts(times, RowCounts(2, 2)) == RowCounts(24, NEVER)


def test_more_rows_than_were_measured_are_unpacked_or_go_by_the_matrix_unit() -> None:
    last = max(ROW_COUNTS)
    registers = times_of(lambda rows, kernel: [1, 2, 3, 3][kernel])
    assert choose_row_counts(registers, DEFAULT) == RowCounts(last + 1, NEVER)
    assert choose_row_counts(times_of(lambda rows, kernel: [1, 3, 2, 2][kernel]), DEFAULT).matrices_from == last + 1


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_single_long_times_do_not_count() -> None:
    seen: set[tuple[int, int]] = set()

    def timer(rows: int, kernel: int) -> float:
        is_first = (rows, kernel) not in seen
        seen.add((rows, kernel))
        return (rows + kernel) * (50 if is_first else 1)

    assert time_kernels(timer, True, FakeClock(), 1) == times_of(lambda rows, kernel: rows + kernel)


def test_times_that_never_agree_decide_nothing() -> None:
    numbers = iter(range(1, 10_000))
    assert time_kernels(lambda rows, kernel: 1.5 ** (next(numbers) % 7), False, FakeClock(), 1) is None
    assert is_steady([[1, 1.1, 9], [5, 5, 5], [2, 4, 8]]) and not is_steady([[1, 1.3, 1.3], [1, 2, 3]])


def test_a_measurement_ends_at_its_limit() -> None:
    clock = FakeClock()

    def timer(rows: int, kernel: int) -> float:
        clock.now += 0.01
        return 0.01

    assert time_kernels(timer, False, clock, 0.2) is None
    assert 0.2 <= clock.now <= 0.23


# ---- with kernels ----


@pytest.fixture
def weights() -> list[PackedWeight]:
    return [PackedWeight(random_groups(4, 32, True, 48, 64, seed), None) for seed in range(3)]


def choices_of(weights: list[PackedWeight], file: Path | None, machine: Machine | None = None) -> KernelChoices:
    choices = KernelChoices(machine, file)
    for weight in weights:
        choices.add(weight)
    return choices


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_every_choice_has_the_same_bits(form: tuple[int, int, bool]) -> None:
    weight = PackedWeight(random_groups(*form, 70, 800), random(70, seed=3))
    multiply, x = QuantisedLinear(weight), random(100, 800)
    x[::3, 400] *= 50
    for rows in (1, 2, 8, 9, 15, 16, 17, 33, 48, 60, 100):
        expected = multiply(x[:rows])
        for counts in [(NEVER, NEVER), (1, NEVER), (NEVER, 1), (2, 9), (5, 16)]:
            weight.structure.unpack_from, weight.structure.matrices_from = counts
            assert torch.equal(multiply(x[:rows]), expected), (rows, counts)
        weight.structure.unpack_from, weight.structure.matrices_from = RowCounts()


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_weights_are_timed_within_their_memory(form: tuple[int, int, bool]) -> None:
    """Of 3 panels with some columns missing, in parts of 1 panel and of all."""
    weight = PackedWeight(random_groups(*form, 40, 64), None)
    kernels, x = native.library(), random(5, 64)
    assert kernels is not None
    whole = QuantisedLinear(weight)(x)
    scratch = torch.empty(20 * kernels.ratoon_quantised_scratch(64), dtype=torch.uint8)
    for num_panels, sizes in {1: [16, 16], 2: [32], 3: [40], 99: [40]}.items():
        parts = native_measurement.parts_of(weight, num_panels)
        assert [part.out_features for part in parts] == sizes
        for first, part in zip(range(0, 48, 16 * num_panels), parts, strict=False):
            address, y = ctypes.addressof(part), torch.empty(5, part.out_features)
            kernels.ratoon_quantised_linear(
                address, x.data_ptr(), 64, 5, scratch.data_ptr(), y.data_ptr(), part.out_features
            )
            assert torch.equal(y, whole[:, first : first + part.out_features])


@needs_kernels
def test_a_timer_runs_the_kernel_that_it_is_asked_for(weights: list[PackedWeight]) -> None:
    kernels, timer = native.library(), ProductTimer(weights, 1)
    assert kernels is not None
    for rows in ROW_COUNTS:
        for kernel in kernels_for(rows, timer.has_matrices):
            assert timer(rows, kernel) > 0
            weights[0].structure.unpack_from, weights[0].structure.matrices_from = counts_for(kernel)
            taken = kernels.ratoon_quantised_kernel(weights[0].pointer, rows)
            assert taken == (MATRICES if kernel == WHOLE_STRIPS else kernel)
            assert kernel_of(counts_for(kernel), rows) == kernel
    few = 16 if native.kernel_set_name().startswith("avx512") else 1  # wide registers hold half a strip at a time
    assert timer.default.unpack_from > few


@needs_kernels
def test_the_second_engine_has_what_the_first_one_measured(
    weights: list[PackedWeight], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = RowCounts(3, 5)
    monkeypatch.setattr(native_measurement, "choose_row_counts", lambda times, default: measured)
    monkeypatch.setattr(native_measurement, "is_steady", lambda times: True)
    machine, file = this_machine(1), tmp_path / "choices.json"
    first = choices_of(weights, file, machine)
    assert [one["choice"] for one in first.facts()] == ["default"]
    measure_kernels(first, 1, limit=60)
    assert {(one.structure.unpack_from, one.structure.matrices_from) for one in weights} == {measured}
    (facts,) = first.facts()
    assert facts["choice"] == "measured" and facts["count"] == 3 and facts["weights"] == "4 bits with offsets, 64 → 48"
    assert facts["kernels"]["unpacked"] == 3

    fresh = PackedWeight(random_groups(4, 32, True, 48, 64), None)
    second = choices_of([fresh], file, machine)
    assert fresh.structure.unpack_from == 3 and [one["choice"] for one in second.facts()] == ["cached"]
    before = file.stat()
    measure_kernels(second, 1)
    assert not second.unknown() and file.stat().st_mtime_ns == before.st_mtime_ns
    off = choices_of([fresh], None)
    assert fresh.structure.unpack_from == 0 and off.facts()[0]["choice"] == "default" and not off.unknown()


@needs_kernels
def test_what_there_was_no_time_for_has_the_default_and_is_measured_later(
    weights: list[PackedWeight], tmp_path: Path
) -> None:
    machine, file = this_machine(1), tmp_path / "choices.json"
    choices = choices_of(weights, file, machine)
    measure_kernels(choices, 1, limit=0)
    assert weights[0].structure.unpack_from == 0 and len(choices.unknown()) == 1 and not file.exists()
