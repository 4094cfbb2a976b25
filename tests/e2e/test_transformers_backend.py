"""A server whose model runs through the Transformers library: its own process has no torch, its engine's has both."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

from tests.e2e.servers import Server, serving
from tests.golden.library_models import greedy_tokens, library_folder
from tests.golden.tiny_models import random_token_ids
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow


def ask(server: Server, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.api}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


@pytest.mark.full
def test_a_server_answers_as_the_library_does_and_finds_prefixes() -> None:
    prompt = random_token_ids(40, seed=9)
    with serving(library_folder("exaone4"), "--load-format", "auto") as server:
        found = [
            ask(server, "/completions", prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True) for _ in range(2)
        ]
    for answer in found:
        tokens = [int(number) for number in re.findall(r"w(\d+)", answer["choices"][0]["text"])]
        assert tokens == greedy_tokens("exaone4", prompt, 12)
    assert found[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
