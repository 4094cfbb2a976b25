"""Parts that packages register: found by name, loaded when they are used; a broken one fails alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.select import select_backend
from ratoon.core import plugins
from ratoon.core.errors import ConfigError, ModelError
from ratoon.core.kv_connector import BlockIndex, BlockMover, KVConnector, TransferIndex
from ratoon.core.plugins import (
    DEVICES,
    MODELS,
    PluginError,
    find_plugin,
    installed_plugins,
    load_plugin,
    plugin_facts,
    plugin_names,
)
from ratoon.execution.device_kinds import open_device
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.registry import find_model_class
from ratoon.models.weight_formats import read_weight_format
from tests.unit.models.model_files import LLAMA_CONFIG

NEEDS = AttentionNeeds("cpu", torch.float32, 16, 32, 4, 2)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Packages(tmp_path)
    yield made
    for name in made.names:
        sys.modules.pop(name, None)
    clear()


def clear() -> None:
    installed_plugins.cache_clear()
    load_plugin.cache_clear()


class Packages:
    """A folder of packages, as an installer leaves them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: list[str] = []

    def add(self, name: str, text: str, **entries: dict[str, str]) -> None:
        """A package of one module, `name`, whose entry points by group (without its prefix) are names of objects."""
        self.names.append(name)
        (self._folder / f"{name}.py").write_text(text)
        info = self._folder / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = []
        for group, objects in entries.items():
            lines += [f"[ratoon.{group}]", *(f"{key} = {name}:{value}" for key, value in objects.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        clear()


def fit(found: object) -> bool:
    return True


def test_a_part_is_loaded_when_it_is_asked_for_and_a_broken_package_stops_no_other(packages: Packages) -> None:
    packages.add("good_parts", "PART = 5", devices={"good": "PART"})
    packages.add("broken_parts", "import a_module_that_is_not_there", devices={"broken": "PART"})
    packages.add("absent_parts", "", devices={"absent": "PART"})
    assert plugin_names(DEVICES) == ["absent", "broken", "good"]
    assert "good_parts" not in sys.modules, "nothing is imported for a list of names"
    assert find_plugin(DEVICES, "good", fit, "part") == 5
    assert find_plugin(DEVICES, "other", fit, "part") is None and find_plugin(MODELS, "good", fit, "part") is None
    whole = r"ratoon.devices 'broken' is registered by the package broken_parts 1.5, and broken_parts:PART can't be "
    with pytest.raises(PluginError, match=whole + r"loaded \(ModuleNotFoundError: No module named 'a_module"):
        find_plugin(DEVICES, "broken", fit, "part")
    with pytest.raises(PluginError, match="AttributeError"):
        find_plugin(DEVICES, "absent", fit, "part")
    facts = {one["name"]: one["problem"] for one in plugin_facts()}
    assert facts["good"] is None and "can't be loaded" in facts["broken"] and "can't be loaded" in facts["absent"]


def test_the_first_of_two_packages_with_one_name_is_used(packages: Packages, caplog: pytest.LogCaptureFixture) -> None:
    packages.add("first_one", "PART = 1", devices={"same": "PART"})
    packages.add("second_one", "PART = 2", devices={"same": "PART"})
    (found,) = [one for one in installed_plugins() if one.name == "same"]
    assert load_plugin(found) == (1 if found.package == "first_one 1.5" else 2)
    (line,) = caplog.messages
    assert "is registered by" in line and "first_one 1.5" in line and "second_one 1.5" in line


def test_a_package_with_damaged_entry_points_is_left_out(
    packages: Packages, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packages.add("damaged", "", devices={"lost": "X"})
    packages.add("sound", "PART = 1", devices={"sound": "PART"})
    (tmp_path / "damaged-1.5.dist-info" / "entry_points.txt").write_text("[ratoon.devices]\nneither name nor value\n")
    clear()
    assert plugin_names(DEVICES) == ["sound"]
    assert "the entry points of the package damaged can't be read" in caplog.text


def test_built_in_parts_are_found_without_reading_the_metadata_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "installed_plugins", lambda: pytest.fail("metadata was read"))
    config = parse_hf_config(LLAMA_CONFIG, "a folder")
    find_model_class(config.architecture)
    open_device("cpu")
    for name in ("auto", "torch"):
        select_backend(name, NEEDS, "layers")
    assert read_weight_format({}, "a folder") is None
    assert read_weight_format({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "a folder") is not None


# ---- what each group does with a broken or unfit part ----


BROKEN = {"models": {"BadForCausalLM": "X"}, "attention_backends": {"bad": "X"}, "devices": {"bad": "X"}}


def test_an_unfit_part_is_an_error_of_what_asked_for_it(packages: Packages) -> None:
    packages.add("unfit", "X = 3", weight_formats={"bad": "X"}, **BROKEN)
    with pytest.raises(ModelError, match=r"BadForCausalLM: .*package unfit 1.5, and unfit:X is no ModelFamily"):
        parse_hf_config({**LLAMA_CONFIG, "architectures": ["BadForCausalLM"]}, "a folder")
    with pytest.raises(ConfigError, match=r"attention_backend: 'bad' .* unfit:X is no backend named 'bad'"):
        select_backend("bad", NEEDS, "layers")
    with pytest.raises(ConfigError, match=r"device: 'bad' .* unfit:X is no object with the methods open, make_ops"):
        open_device("bad")
    with pytest.raises(ModelError, match=r"a folder: is quantised with bad, which .* unfit:X is no function"):
        read_weight_format({"quantization_config": {"quant_method": "bad"}}, "a folder")


def test_errors_for_unknown_names_list_what_is_registered(packages: Packages) -> None:
    packages.add("unfit", "X = 3", weight_formats={"bad": "X"}, **BROKEN)
    with pytest.raises(
        ModelError, match=r"'OtherForCausalLM' is not supported; known: …ForCausalLM of Bad, DeepseekV2"
    ):
        parse_hf_config({**LLAMA_CONFIG, "architectures": ["OtherForCausalLM"]}, "a folder")
    with pytest.raises(ConfigError, match=r"'other' is unknown; auto, .*, bad"):
        select_backend("other", NEEDS, "layers")
    with pytest.raises(ConfigError, match=r"'other' is unknown; auto, cpu, cuda, cuda:N, bad"):
        open_device("other")
    with pytest.raises(ModelError, match="is quantised with other"):
        read_weight_format({"quantization_config": {"quant_method": "other"}}, "a folder")


FAMILY = """
from ratoon.models.family import ModelFamily
FAMILY = ModelFamily("own_family_class:Own", {config})
"""


@pytest.mark.parametrize("config", ['"LlamaForCausalLM"', "lambda fields, architecture: CONFIG"])
def test_a_family_reads_its_config_and_names_its_class(packages: Packages, config: str) -> None:
    raw = {**LLAMA_CONFIG, "architectures": ["OwnForCausalLM"]}
    whole = parse_hf_config(LLAMA_CONFIG, "a folder")
    packages.add(
        "own_family",
        f"from ratoon.models.hf_config import parse_hf_config\nCONFIG = parse_hf_config({LLAMA_CONFIG!r}, '')"
        + FAMILY.format(config=config),
        models={"OwnForCausalLM": "FAMILY"},
    )
    assert parse_hf_config(raw, "a folder") == replace(whole, architecture="OwnForCausalLM")
    with pytest.raises(ModelError, match="OwnForCausalLM: its class own_family_class:Own can't be imported"):
        find_model_class("OwnForCausalLM")


def test_a_family_like_one_that_is_not_built_in_is_refused(packages: Packages) -> None:
    packages.add("own_family", FAMILY.format(config='"Nothing"'), models={"OwnForCausalLM": "FAMILY"})
    with pytest.raises(ModelError, match="reads it as one of 'Nothing', which is not built in"):
        parse_hf_config({**LLAMA_CONFIG, "architectures": ["OwnForCausalLM"]}, "a folder")


def test_a_device_of_a_type_without_a_runner_is_refused(packages: Packages) -> None:
    text = (
        "import torch\nclass Kind:\n    def open(self, name): return torch.device('meta')\n    make_ops = None.__eq__"
    )
    packages.add("odd_device", text + "\nKIND = Kind()", devices={"odd": "KIND"})
    with pytest.raises(ConfigError, match=r"'odd:1' is a device of torch's type 'meta', for which there is no runner"):
        open_device("odd:1")


def test_the_page_of_plugins_names_every_call_of_a_connector() -> None:
    text = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text()
    page = text.partition("## A KV connector\n")[2].partition("## Trust\n")[0]
    named = set(re.findall(r"`(\w+)(?:\([^`)]*\))?(?: = True)?`", page))
    calls = {
        name
        for half in (KVConnector, BlockIndex, TransferIndex, BlockMover)
        for name in vars(half)
        if not name.startswith("_") and name != "load_or_log"  # which the engine calls, and no package writes
    }
    assert len(calls) > 15 and not calls - named
