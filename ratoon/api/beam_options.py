"""The command-line options of a beam search, and what they turn into: BeamSearchParams, or fields of a request."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ratoon.api.beams import COMPANIONS, find_companion, find_contradiction
from ratoon.api.parser import leave_out, show_everyday
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.core.params import BeamSearchParams

# Rules over logits, for sampling and for a search.
TOKEN_RULES = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "forced_eos_token_id",
)  # fmt: skip
# Those that a beam search takes; the names are those of BeamSearchParams.
OPTIONS = (*COMPANIONS, *TOKEN_RULES, "n", "max_tokens", "min_tokens", "ignore_eos")


def add_beam_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("beam search")
    width = "beam search with N beams, instead of sampling"
    action = group.add_argument("--beam-width", type=int, metavar="N", help=width)
    leave_out(group)
    show_everyday(action, width)
    group.add_argument(
        "--length-penalty", type=float, metavar="X", help="above 0 favours long texts, below 0 short ones"
    )
    group.add_argument(
        "--early-stopping",
        type=_switch,
        metavar="WHEN",
        help="true: stop with the first N finished texts; false (default), never: when others can't become better",
    )


def wants_beam_search(args: argparse.Namespace) -> bool:
    return getattr(args, "beam_width", None) is not None


def leaves_search_open(args: argparse.Namespace) -> bool:
    """Whether the options neither request a search nor say how to sample; the model's defaults then decide."""
    if wants_beam_search(args) or getattr(args, "temperature", None) is not None:
        return False
    return find_contradiction(lambda name: getattr(args, name, None)) is None


def check_beam_options(args: argparse.Namespace) -> None:
    """RequestError for options that contradict a beam search, or that have no meaning without one."""

    def value_of(name: str) -> Any:
        return getattr(args, name, None)

    if not wants_beam_search(args):
        alone = find_companion(value_of)
        if alone is not None:
            raise RequestError(_option(alone), "has no meaning without --beam-width", "add that, or leave it out")
        return
    contradicting = find_contradiction(value_of)
    if contradicting is not None:
        problem = "contradicts --beam-width, which samples nothing"
        raise RequestError(_option(contradicting), problem, "leave one of them out")
    beam_search_params(args).verify()


def beam_search_params(args: argparse.Namespace) -> BeamSearchParams:
    from ratoon.core.params import BeamSearchParams

    return BeamSearchParams(**_given(args))


def beam_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of a request body."""
    return {"use_beam_search": True, **_given(args)}


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return given_options(args, OPTIONS)


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Returns the options that were given, by name, and `max_tokens` in any case: commands have their own default."""
    found = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return {"max_tokens": args.usual_max_tokens, **found} if "usual_max_tokens" in args else found


def _switch(text: str) -> bool | str:
    """Other values are rejected when the params are checked."""
    return {"true": True, "false": False}.get(text, text)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
