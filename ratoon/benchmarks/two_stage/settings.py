"""Settings of a two-stage run, checked before the model is loaded, and the size of its KV cache."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

import msgspec

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import MAX_BEAM_WIDTH

if TYPE_CHECKING:
    from ratoon.core.config import ModelConfig


class TwoStageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens."""

    prompt_tokens: int
    stage1_tokens: int
    suffix_tokens: int
    beam_width: int
    beam_tokens: int
    rounds: int
    requests: int  # conversations at once
    seed: int

    @property
    def whole_tokens(self) -> int:
        """The tokens before stage 2's beams: prompt, answer and suffix."""
        return self.prompt_tokens + self.stage1_tokens + self.suffix_tokens


def settings_of(args: argparse.Namespace) -> TwoStageSettings:
    """RequestError, with the option's name, for invalid values."""
    given = {name: getattr(args, name) for name in TwoStageSettings.__struct_fields__}
    settings = TwoStageSettings(**{**given, "requests": 1 if args.requests is None else args.requests})
    for name in ("prompt_tokens", "stage1_tokens", "beam_width", "beam_tokens", "rounds", "requests"):
        _require(name, getattr(settings, name), 1)
    _require("suffix_tokens", settings.suffix_tokens, 0)
    _require("seed", settings.seed, 0)
    if settings.beam_width > MAX_BEAM_WIDTH:
        raise RequestError("--beam-width", f"{settings.beam_width} is out of range", f"at most {MAX_BEAM_WIDTH}")
    if args.enable_prefix_caching is False:
        raise RequestError("--no-prefix-caching", "leaves nothing to compare with", "leave it out")
    return settings


def check_model(settings: TwoStageSettings, model: ModelConfig, max_model_len: int | None) -> None:
    """RequestError for what this model can't do."""
    longest = model.max_position if max_model_len is None else max_model_len
    total = settings.whole_tokens + settings.beam_tokens
    if total > longest:
        raise RequestError(
            "--prompt-tokens", f"makes {total} tokens with those that follow it", f"{longest} at most, all together"
        )
    if settings.beam_width > model.vocab_size:
        raise RequestError(
            "--beam-width", f"{settings.beam_width} is more than the vocabulary", f"at most {model.vocab_size}"
        )


def fitting_engine(settings: TwoStageSettings, model: ModelConfig, args: argparse.Namespace) -> dict[str, int]:
    """Keywords for LLM that the command line does not set.

    The KV cache is as large as the work needs and no larger: filling it up takes time. Leases get their share.
    """
    keywords = {}
    if args.max_num_seqs is None:
        keywords["max_num_seqs"] = max(SchedulerConfig().max_num_seqs, settings.beam_width)
    if args.num_blocks is None and args.kv_memory is None:
        keywords["num_blocks"] = _num_blocks(settings, model, args)
    return keywords


def _num_blocks(settings: TwoStageSettings, model: ModelConfig, args: argparse.Namespace) -> int:
    block_size = args.block_size or CacheConfig().block_size
    lease_fraction = CacheConfig().lease_fraction if args.lease_fraction is None else args.lease_fraction
    num_groups = len({model.window_of_layer(layer) for layer in range(model.num_layers)})
    whole = settings.requests * num_groups * (-(-settings.whole_tokens // block_size) + 1)
    beams = settings.requests * num_groups * settings.beam_width * (-(-settings.beam_tokens // block_size) + 1)
    leasable = math.ceil(whole / lease_fraction) if lease_fraction > 0 else 0
    return 1 + max(2 * whole + beams, leasable)  # the parents, others beside them that are as long, the beams


def _require(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise RequestError(f"--{name.replace('_', '-')}", f"{value} is out of range", f"at least {lowest}")
