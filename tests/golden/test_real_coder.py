"""A real Qwen2.5-Coder of 1.5 B parameters, from a GGUF file: the code that it writes does what it was asked for, and
its calls of tools have the right arguments. The code runs in a process of its own, under limits of time and memory.

The file has 1.1 GB, and is not brought by tests: `python -m tests.real_models qwen2.5-coder-1.5b`.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon import LLM, SamplingParams
from ratoon.api.chat_turn import ChatTurn
from tests.golden.engines import check_nothing_left
from tests.real_models import qwen_coder

MOST_TOKENS = 96
SECONDS, MEMORY = 10, 2**30  # of what the model has written
TASK = (
    "Write a Python function `count_vowels(text)` that returns how many of the characters of `text` are vowels "
    "(a, e, i, o, u), upper or lower case. Answer with the code alone: no examples, no explanation."
)
CHECKS = """
assert count_vowels("") == 0
assert count_vowels("rhythm") == 0
assert count_vowels("Ratoon") == 3
assert count_vowels("AEIOU aeiou xyz") == 10
print("all right")
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    path = qwen_coder()
    with LLM(str(path), device="cpu", max_model_len=512, num_blocks=64) as built:
        yield built
        check_nothing_left(built)


def run_apart(program: str, folder: Path) -> str:
    """Runs a program in a process without the environment and the packages of this one."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], cwd=folder, env={}, capture_output=True, text=True,
        timeout=60, preexec_fn=limit, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{program}\n{done.stderr}"
    return done.stdout


def test_a_function_that_it_writes_does_what_it_was_asked_for(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS)
    (output,) = llm.chat([{"role": "user", "content": TASK}], params, progress=False)
    text = output.outputs[0].text
    code = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    assert run_apart((code[1] if code else text) + CHECKS, tmp_path) == "all right\n"


def test_it_calls_a_tool_with_the_right_arguments(llm: LLM) -> None:
    """Left to itself, so small a model writes the call without its tags: here it must make one."""
    question = [{"role": "user", "content": "How warm is it in Lisbon? I want degrees Celsius."}]
    turn = ChatTurn(llm, question, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    params = turn.params(SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS))
    (output,) = llm.generate([turn.prompt], params, progress=False)
    (call,) = turn.read(output).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Lisbon", "unit": "celsius"})
