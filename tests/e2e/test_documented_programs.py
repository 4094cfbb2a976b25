"""The programs in the pages on structured output, tools, responses and messages run as they are written, with the model
that they name; only the server's address is another one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import Server, serving
from tests.real_models import needs_embedded_model

pytestmark = [needs_embedded_model, pytest.mark.slow]

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
ADDRESS = re.compile(r"http://(?:localhost|127\.0\.0\.1):8000")
MODEL = "smollm2-135m"
LIMIT = 300  # seconds; a program takes a few, but the machine may be busy


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(MODEL, "--load-format", "auto") as running:
        yield running


def run_programs(page: str, server: Server) -> list[str]:
    """Those of a page one after the other, as one reads them. Returns the lines that they print."""
    programs = PROGRAM.findall((DOCS / page).read_text())
    assert programs
    text = ADDRESS.sub(server.url, "\n".join(programs))
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_structured_output(server: Server) -> None:
    in_process, over_http = run_programs("structured-output.md", server)
    for shown in (in_process, over_http):
        assert re.fullmatch(r"name='.+' country='.*' population=-?\d+", shown)


def test_tools(server: Server) -> None:
    lines = run_programs("tools.md", server)
    assert re.fullmatch(r"weather \{'city': '(Paris|Tokyo)'\}", lines[0])
    assert re.fullmatch(r".*\[\('weather', '\{\"city\": ?\"(Paris|Tokyo)\"\}'\)\]", lines[-1])


def test_responses(server: Server) -> None:
    *_, second = run_programs("responses.md", server)
    assert int(second.split()[-1]) > 10  # the first question and its answer were not computed again


def test_messages(server: Server) -> None:
    assert any(line.strip() for line in run_programs("messages.md", server))
