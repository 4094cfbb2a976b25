"""The requests of every_kind.py over HTTP, through two front ends in turn."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.front_ends import MODEL, FrontEnd, each_front_end
from tests.e2e.servers import serving
from tests.golden.every_kind import INSIDE, LAYERS, PROMPTS, SCHEMA, SUFFIX, TEXTS, Answers, right_answers


class Client:
    """Sends each request to the front end that did not get the one before."""

    def __init__(self, front_ends: list[FrontEnd]) -> None:
        self._turns = itertools.cycle(front_ends)

    def complete(self, **body: Any) -> Any:
        return next(self._turns).post("/v1/completions", return_token_ids=True, **body)

    def read_states(self, **body: Any) -> np.ndarray:
        asked = {"positions": "all", "layers": LAYERS}
        found = next(self._turns).post("/v1/hidden_states", **asked, **body)
        return np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])


@contextmanager
def two_front_ends(folder: Path, *options: str) -> Iterator[Client]:
    """Before two engines."""
    counts = ("--api-servers", "2", "--data-parallel-size", "2")
    names = ("--served-model-name", MODEL, "--load-format", "auto")
    with serving(folder, *counts, *names, *options) as server, each_front_end(server, key=None) as front_ends:
        yield Client(front_ends)


def tokens_of(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


GREEDY = {"temperature": 0, "ignore_eos": True}
DRAWN = {"n": 2, "seed": 3, "temperature": 1, "max_tokens": 8, "ignore_eos": True}
BEAMS = {"use_beam_search": True, "beam_width": 3, "ignore_eos": True}


def ask_over_http(client: Client) -> Answers:
    """What `ask_everything` asks."""
    tokens: dict[str, list[Any]] = {}
    tokens["greedy"] = tokens_of(client.complete(prompt=PROMPTS, max_tokens=24, **GREEDY))
    tokens["drawn"] = [found for prompt in PROMPTS for found in tokens_of(client.complete(prompt=prompt, **DRAWN))]
    beams = {**BEAMS, "max_tokens": 6}
    tokens["beams"] = [found for prompt in PROMPTS[:2] for found in tokens_of(client.complete(prompt=prompt, **beams))]
    scored = client.complete(prompt=PROMPTS, max_tokens=4, logprobs=5, prompt_logprobs=0, **GREEDY)
    tokens["with scores"] = tokens_of(scored)
    root = client.complete(prompt=PROMPTS[0], max_tokens=6, retain_kv=60, **GREEDY)
    child = client.complete(continuation_of=root["id"], continuation_suffix=SUFFIX, max_tokens=6, **GREEDY)
    assert child["continuation"]["source"] == "lease"
    assert child["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPTS[0]) + 5
    tokens["continued"] = tokens_of(root) + tokens_of(child)
    inside = client.complete(
        continuation_of=root["id"], continuation_at=INSIDE, continuation_suffix=[1], max_tokens=3, **GREEDY
    )
    tokens["continued inside"] = tokens_of(inside)
    numbers = {
        "logprobs": np.array(
            [sorted(place.values()) for choice in scored["choices"] for place in choice["logprobs"]["top_logprobs"]]
        ),
        "of the prompt": np.array(
            [
                entry["logprob"]
                for choice in scored["choices"]
                for place in choice["prompt_logprobs"][1:]
                for entry in place.values()
            ]
        ),
        "hidden states": client.read_states(prompt=PROMPTS[2]),
        "states of a request": client.read_states(original_request_id=child["id"]),
    }
    asked = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60}
    tokens["structured"] = [
        found
        for seed, text in enumerate(TEXTS)
        for found in tokens_of(client.complete(prompt=text, seed=seed, **asked))
    ]
    return Answers(tokens, numbers)


def check_everything(client: Client, **settings: Any) -> None:
    """The answers are those of one worker with these settings, to the bit."""
    right = right_answers(**settings)
    by_size = {"logprobs": np.sort(right.numbers["logprobs"])}  # as JSON has them, without the order of ranks
    ask_over_http(client).check(Answers(right.tokens, {**right.numbers, **by_size}), tolerance=0)
