"""The examples run, with little data, and find what they say they find."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_models import needs_embedded_model

REPOSITORY = Path(__file__).parents[2]
LIMIT = 600  # seconds; a run takes about ten, but the machine may be busy


def run_example(name: str) -> str:
    command = [sys.executable, f"examples/{name}", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def share(shown: str, line: str) -> float:
    """The percentage in the line that begins so."""
    (found,) = re.findall(rf"(?m)^{re.escape(line)}\b.*?(\d+)%", shown)
    return int(found) / 100


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_a_probe_hears_praise_in_words_that_it_was_not_trained_on() -> None:
    shown = run_example("linear_probe.py")
    assert share(shown, "words counted") == share(shown, "layer  0") == 0.5  # nothing to go by
    assert share(shown, "layer 16") >= 0.9


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_last_token_states_find_what_common_words_do_not() -> None:
    shown = run_example("retrieval.py")
    assert share(shown, "common words") <= 0.3
    assert share(shown, "asked to sum up") >= 0.8


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_a_value_head_counts_open_brackets_from_states_and_not_from_tokens() -> None:
    shown = run_example("value_head.py")
    assert share(shown, "layer 0") <= 0.7
    assert share(shown, "layer 4") >= 0.8
    rows = re.findall(r"(?m)^ *(-?[\d.]+) +(\d+)  '", shown)
    assert len(rows) == 10 + 10  # a value for each token, of the prompt and of the answer
    assert sum(abs(float(value) - int(number)) for value, number in rows) / len(rows) < 0.8
