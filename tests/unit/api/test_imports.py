"""What must be quick stays quick: these load neither torch nor the engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW_MODULES = ("torch", "numpy", "transformers", "tokenizers", "rich", "huggingface_hub", "jinja2", "gguf")


@pytest.mark.parametrize(
    "statement",
    [
        "import ratoon",
        "from ratoon import cli; from ratoon.api.cli import build_parser; build_parser(cli.COMMANDS)",
        "from ratoon import BeamSearchParams",
    ],
)
def test_nothing_slow_is_imported(statement):
    code = f"{statement}\nimport sys\nprint([name for name in {SLOW_MODULES!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_api_class_is_importable_without_torch():
    code = "import ratoon.api.llm, sys; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
