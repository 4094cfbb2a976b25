"""Settings of a two-stage run, checked before a model is loaded or a request sent, and the size of its KV cache."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import msgspec

from ratoon.benchmarks.loadgen.settings import above_zero, at_least
from ratoon.benchmarks.two_stage.conversations import FileConversation, read_conversations
from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import MAX_BEAM_WIDTH

if TYPE_CHECKING:
    from ratoon.core.config import ModelConfig


DEFAULT_CONVERSATIONS = 8  # in a round, over HTTP
# Options: their defaults, what they are, and the lowest value.
SIZES = (
    ("prompt_tokens", 500, "tokens of a prompt", 1),
    ("stage1_tokens", 200, "tokens that stage 1 samples", 1),
    ("suffix_tokens", 5, "tokens between the answer and the beams", 0),
    ("beam_width", 32, "beams of stage 2", 1),
    ("beam_tokens", 3, "tokens of each beam", 1),
    ("rounds", 3, "rounds; the variants take turns", 1),
    ("seed", 0, "of prompts and samples", 0),
)


class TwoStageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens."""

    prompt_tokens: int
    stage1_tokens: int
    suffix_tokens: int
    beam_width: int
    beam_tokens: int
    rounds: int
    seed: int
    num_conversations: int  # in a round
    concurrency: int | None  # conversations at once; None: no limit
    # Over HTTP alone
    file: str | None = None
    file_conversations: list[FileConversation] | None = None
    request_rate: float = math.inf  # conversations that begin in a second
    burstiness: float = 1.0

    @property
    def whole_tokens(self) -> int:
        """The tokens before stage 2's beams: prompt, answer and suffix."""
        return self.prompt_tokens + self.stage1_tokens + self.suffix_tokens

    @property
    def ignore_eos(self) -> bool:
        """Whether answers have their full length. In conversations of a file they end where the model ends them."""
        return self.file_conversations is None

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings for a report: without the conversations themselves, and without infinity, which JSON
        does not have."""
        facts: dict[str, Any] = msgspec.to_builtins(self)
        del facts["file_conversations"]
        facts["request_rate"] = None if math.isinf(self.request_rate) else self.request_rate
        return facts


def settings_of(args: argparse.Namespace) -> TwoStageSettings:
    """RequestError, with the option's name, for invalid values."""
    for option, _, _, lowest in SIZES:
        at_least(args, option, lowest)
    at_least(args, "requests", 1)
    if args.beam_width > MAX_BEAM_WIDTH:
        raise RequestError("--beam-width", f"{args.beam_width} is out of range", f"at most {MAX_BEAM_WIDTH}")
    if args.enable_prefix_caching is False:
        raise RequestError("--no-prefix-caching", "leaves nothing to compare with", "leave it out")
    sizes = {option: getattr(args, option) for option, _, _, _ in SIZES}
    at_once = 1 if args.requests is None else args.requests
    if args.url is None:
        return TwoStageSettings(**sizes, num_conversations=at_once, concurrency=at_once)
    at_least(args, "num_conversations", 1)
    for name in ("request_rate", "burstiness", "timeout"):
        above_zero(args, name)
    lines = None if args.file is None else read_conversations(args.file, args.stage1_tokens)
    if lines is not None and args.num_conversations is not None and args.num_conversations > len(lines):
        raise RequestError("--num-conversations", f"{args.num_conversations}, but {args.file} has {len(lines)}")
    count = args.num_conversations or (DEFAULT_CONVERSATIONS if lines is None else len(lines))
    return TwoStageSettings(
        **sizes,
        num_conversations=count,
        concurrency=at_once if math.isinf(args.request_rate) else args.requests,
        file=args.file,
        file_conversations=None if lines is None else lines[:count],
        request_rate=args.request_rate,
        burstiness=args.burstiness,
    )


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
    whole = settings.num_conversations * num_groups * (-(-settings.whole_tokens // block_size) + 1)
    beams = settings.num_conversations * num_groups * settings.beam_width * (-(-settings.beam_tokens // block_size) + 1)
    leasable = math.ceil(whole / lease_fraction) if lease_fraction > 0 else 0
    return 1 + max(2 * whole + beams, leasable)  # the parents, others beside them that are as long, the beams
