"""Dozens of hostile grammars at once: each is answered with a finding or a named limit, and other keys do not wait."""

from __future__ import annotations

import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from bench.attack_parts.grammar_bombs import bombs
from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars.checks import GrammarChecks, Limits
from ratoon.models.tokenizer import Tokenizer
from tests.unit.models.model_files import train_byte_level

PATIENCE_SECONDS = 240.0
MAX_GROWTH_BYTES = 64 * 2**20


def resident_bytes(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow  # each of them is another way to need too much, and some take all the time that they may
def test_bombs_of_one_key_are_answered_and_hold_up_no_other() -> None:
    tokenizer = Tokenizer(train_byte_level(), {})
    checks = GrammarChecks(tokenizer, tokenizer.vocab_size, [], Limits(seconds=1.0))
    try:
        checks.verify(StructuredOutput(json_object=True), "b")
        assert checks._process is not None
        before = {pid: resident_bytes(pid) for pid in ("self", checks._process._child.process.pid)}
        futures, refused = {}, {}
        for name, fields in bombs().items():
            try:
                (asked := StructuredOutput(**fields)).verify()
                futures[name] = checks.check(asked, "a")
            except RequestError as error:
                refused[name] = str(error)
        start = time.monotonic()
        for number in range(5):
            schema = {"type": "object", "properties": {f"a{number}": {"type": "string"}}}
            checks.verify(StructuredOutput(json_schema=schema), "b")  # type: ignore[arg-type]
        seconds_of_others = time.monotonic() - start
        wait(futures.values(), PATIENCE_SECONDS)
        for name, future in futures.items():
            error = future.result(0).error
            if error is not None:
                assert error[0] and error[1] and len(error[1]) < 1000, name
                refused[name] = error[1]
        assert seconds_of_others < time.monotonic() - start, "they did not wait for all bombs"
        for pid, num_bytes in before.items():
            assert resident_bytes(pid) - num_bytes < MAX_GROWTH_BYTES
        assert len(refused) >= 15
        for name in ("lark, intersected lengths", "lark, itself", "gbnf, chain of rules"):
            assert name in refused
    finally:
        checks.close()
