"""What goes together with a beam search and what does not, by the names that HTTP and the command line share.

Imports nothing heavy, so that the command line can use it before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Sampling options and those that need a text that only grows, with the values that have no effect.
CONTRADICTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "stop": ([],),
    "include_stop_str_in_output": (),
    "logprobs": (),
    "top_logprobs": (),
    "prompt_logprobs": (),
}
# Options that need a beam search, with the values that have no effect.
COMPANIONS: dict[str, tuple[Any, ...]] = {"beam_width": (1,), "length_penalty": (1,), "early_stopping": (False,)}


def find_contradiction(value_of: Callable[[str], Any]) -> str | None:
    """The first name whose value contradicts a beam search. None and False mean that it was not given."""
    for name, harmless in CONTRADICTIONS.items():
        value = value_of(name)
        if value is not None and value is not False and value not in harmless:
            return name
    return None


def find_companion(value_of: Callable[[str], Any]) -> str | None:
    """The first name that was given and has no meaning without a beam search."""
    for name, harmless in COMPANIONS.items():
        value = value_of(name)
        if value is not None and value not in harmless:
            return name
    return None
