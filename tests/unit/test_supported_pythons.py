"""The Python versions that the package promises are those that public CI tests."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_classifiers_requirement_tools_and_workflow_name_the_same_versions() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, tools = settings["project"], settings["tool"]
    prefix = "Programming Language :: Python :: "
    promised = [text.removeprefix(prefix) for text in project["classifiers"] if text.startswith(prefix)]

    (tested,) = re.findall(r"^ +python: (\[.*\])$", (ROOT / ".github/workflows/ci.yml").read_text(), re.MULTILINE)
    assert json.loads(tested) == promised
    assert project["requires-python"] == f">={promised[0]}" == f">={tools['mypy']['python_version']}"
    assert tools["ruff"]["target-version"] == "py" + promised[0].replace(".", "")
