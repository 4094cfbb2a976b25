"""msgspec's types in several threads: none finds a class of which another one has only begun to know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "ratoon"
FIRST_USES = """
import sys, threading
from typing import Literal
import msgspec
from ratoon.core.prepared import prepared
sys.setswitchinterval(1e-6)
failures = []
def use(kind, together):
    together.wait()
    try:
        assert msgspec.convert({"last": 3}, prepared(kind)).last == 3
    except BaseException as error:
        failures.append(error)
for i in range(400):
    inner = msgspec.defstruct(f"Inner{i}", [("x", int, 1)])
    fields = [(f"f{k}", Literal["a", f"b{k}"] | inner, "a") for k in range(8)]
    kind = msgspec.defstruct(f"Outer{i}", [*fields, ("last", int, 1)])
    together = threading.Barrier(4)
    threads = [threading.Thread(target=use, args=(kind, together)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert not failures, failures
"""


def test_a_type_may_be_used_first_by_several_threads_at_once():
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def types_given_to_msgspec(path: Path) -> list[tuple[int, ast.expr]]:
    """Each with its line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("msgspec."):
            continue
        named = [keyword.value for keyword in node.keywords if keyword.arg == "type"]
        name = ast.unparse(node.func).rpartition(".")[2]
        given = {"Decoder": node.args[:1], "convert": node.args[1:2], "decode": node.args[1:2]}.get(name, []) or named
        found += [(node.lineno, one) for one in given]
    return found


def test_every_type_that_goes_to_msgspec_is_prepared():
    given = {path: types_given_to_msgspec(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert sum(map(len, given.values())) > 30
    unprepared = [
        f"{path.relative_to(PACKAGE)}:{line}: {ast.unparse(one)}"
        for path, types in given.items()
        for line, one in types
        if path.name != "prepared.py" and not ast.unparse(one).startswith("prepared(")
    ]
    assert not unprepared
