from __future__ import annotations

import pytest

from ratoon.core.suggestions import did_you_mean, nearest_name

FIELDS = ["n", "stop", "top_p", "top_k", "min_tokens", "max_tokens", "temperature", "presence_penalty", "stream"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("temprature", "temperature"), ("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("topk", "top_k"),
        ("max_tokesn", "max_tokens"), ("presense_penalty", "presence_penalty"), ("steam", "stream"),
        ("presence_penality", "presence_penalty"), ("--max-tokens", "max_tokens"),
    ],
)  # fmt: skip
def test_a_typing_error_is_recognised(typed: str, meant: str) -> None:
    assert nearest_name(typed, FIELDS) == meant


@pytest.mark.parametrize("typed", ["max_length", "m", "x", "", "streaming_mode", "user", "a" * 10_000, "mn"])
def test_what_is_not_close_gets_no_suggestion(typed: str) -> None:
    assert nearest_name(typed, [name for name in FIELDS if name != typed]) is None


def test_the_nearest_of_several_is_named() -> None:
    assert nearest_name("min_token", ["max_tokens", "min_tokens"]) == "min_tokens"
    assert did_you_mean("serv", ["serve", "chat"]) == "did you mean serve?"
    assert did_you_mean("dance", ["serve", "chat"], "see --help") == "see --help"
