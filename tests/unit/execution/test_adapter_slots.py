"""Adapters are loaded beside the steps, and every load is reported: with its error, where it has one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from ratoon.core.adapters import Adapter, AdapterLoad
from ratoon.execution import adapter_slots
from ratoon.execution.adapter_slots import bytes_of_slots, open_slots
from ratoon.models.adapters import digest_of
from tests.golden.adapter_driver import AdapterDriver
from tests.golden.tiny_models import random_token_ids, tiny_llama
from tests.unit.execution.test_model_runner import token_of
from tests.unit.models.test_adapter_files import save

TINY = tiny_llama()
SHAPES = TINY.source.shapes()
LAYER = "model.layers.0.mlp.gate_proj"
PROMPT = random_token_ids(9, seed=3)


def adapter_in(folder: Path, rank: int = 4, layer: str = LAYER) -> Adapter:
    import torch

    num_outputs, num_inputs = SHAPES[f"{layer}.weight"]
    prefix = f"base_model.model.{layer}"
    tensors = {f"{prefix}.lora_A.weight": torch.randn(rank, num_inputs)}
    tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, rank)
    save(folder, tensors)
    return Adapter(digest_of(folder), str(folder), rank)


def test_what_can_not_be_loaded_is_reported_and_leaves_the_slot_empty(tmp_path: Path) -> None:
    driver = AdapterDriver(TINY, "torch", max_rank=8)
    base = driver.generate([(PROMPT, -1)], 3)
    good, changed = adapter_in(tmp_path / "good"), adapter_in(tmp_path / "changed")
    adapter_in(tmp_path / "changed")
    missing, large = Adapter("0" * 32, str(tmp_path / "missing"), 4), adapter_in(tmp_path / "large", rank=9)
    report = driver.load({0: changed, 1: good, 2: missing, 3: large})
    assert report.loaded == [1]
    assert "has changed since the adapter was named" in report.failed[0]
    assert "missing: is not there" in report.failed[2]
    assert "has the rank 9; at most 8 (max_lora_rank)" in report.failed[3]
    assert driver.generate([(PROMPT, -1)], 3) == base
    with pytest.raises(Exception, match="has changed since"):  # of a scheduler that does not read reports
        driver.generate([(PROMPT, 0)], 1)
    with pytest.raises(ValueError, match="slot 7, which was never loaded"):
        AdapterDriver(TINY, "torch").generate([(PROMPT, 7)], 1)
    assert driver.load({0: good}).loaded == [0]


def test_a_load_that_is_announced_again_is_reported_again_and_not_begun_again(tmp_path: Path) -> None:
    driver = AdapterDriver(TINY, "torch")
    adapter = adapter_in(tmp_path / "one")
    assert driver.load({1: adapter}).loaded == [1]
    adapted = driver.generate([(PROMPT, 1)], 3)
    shutil.rmtree(tmp_path / "one")
    assert driver.load({1: adapter}).loaded == [1]
    assert driver.generate([(PROMPT, 1)], 3) == adapted
    other = adapter_in(tmp_path / "one")
    assert driver.load({1: other}).loaded == [1]
    assert driver.generate([(PROMPT, 1)], 3) != adapted


def test_steps_go_on_while_an_adapter_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AdapterDriver(TINY, "torch")
    adapter, may_read = adapter_in(tmp_path / "one"), threading.Event()
    open_adapter = adapter_slots.open_adapter

    def open_later(*arguments: object) -> object:
        assert may_read.wait(30)
        return open_adapter(*arguments)

    monkeypatch.setattr(adapter_slots, "open_adapter", open_later)
    output = driver.step(new=[driver.new("a", PROMPT, 1)], adapter_loads=[AdapterLoad(2, adapter)])
    token_of(output, "a")
    assert output.adapters is None and driver.slots.is_loading
    output = driver.step(known={"a": len(PROMPT)})
    token_of(output, "a")
    assert output.adapters is None
    assert driver.step(awaits_adapters=True).adapters is None  # it waits for a moment
    may_read.set()
    assert driver.load({2: adapter}).loaded == [2]
    assert driver.step(known={"a": len(PROMPT) + 1}).adapters is None  # told once


def test_slots_are_filled_again_after_a_model_was_built_anew(tmp_path: Path) -> None:
    driver = AdapterDriver(TINY, "torch")
    adapter = adapter_in(tmp_path / "one")
    driver.load({1: adapter})
    adapted = driver.generate([(PROMPT, 1)], 3)
    driver.slots.release()
    driver.runner.program.model = model = TINY.build()
    open_slots(model, 8, 64)
    driver.slots.reload(model)
    assert driver.generate([(PROMPT, 1)], 3) == adapted
    driver.slots.close()


def test_a_branch_with_an_adapter_needs_slots_and_its_row_forgets_it() -> None:
    driver = AdapterDriver(TINY, "torch")
    batch = driver.runner.input_batch
    row = batch.add(replace(driver.new("a", PROMPT, 1), adapter_slot=5))
    assert batch.adapter_slots is not None and batch.adapter_slots[row] == 5
    batch.drop("a")
    assert (batch.adapter_slots == -1).all()
    batch.adapter_slots = None
    with pytest.raises(ValueError, match="slot 5, and there are no slots"):
        batch.add(replace(driver.new("b", PROMPT, 1), adapter_slot=5))


def test_the_memory_of_slots_is_that_of_the_highest_rank_beside_all_layers_but_the_head() -> None:
    model = TINY.build()
    layers = [shape for name, shape in SHAPES.items() if ".layers." in name and len(shape) == 2]
    assert bytes_of_slots(model, 3, 8) == 3 * 8 * 4 * sum(sum(shape) for shape in layers)
    assert bytes_of_slots(model, 0, 8) == 0
