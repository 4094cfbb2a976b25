"""What is said while an engine is built."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from ratoon.engine import build


@pytest.mark.parametrize("has_bytecode", [True, False])
def test_a_package_that_is_compiled_at_each_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_bytecode: bool
) -> None:
    source = tmp_path / "large" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(sys, "dont_write_bytecode", not has_bytecode)
    spec = importlib.util.spec_from_file_location("large", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with caplog.at_level(logging.INFO, build.logger.name):
        build.note_missing_bytecode(module)
    assert ("compileall" in caplog.text) == (not has_bytecode)
    assert (str(source.parent) in caplog.text) == (not has_bytecode)
