"""Settings of a run over HTTP: resolved and checked once, before any request is sent."""

from __future__ import annotations

import argparse
import math
from typing import Any

import msgspec

from ratoon.api.remote.options import refuse_engine_options
from ratoon.benchmarks.loadgen.settings import above_zero, at_least
from ratoon.benchmarks.two_stage.over_http.conversations import FileConversation, read_conversations
from ratoon.benchmarks.two_stage.settings import TwoStageSettings, settings_of
from ratoon.core.errors import RequestError

DEFAULT_CONVERSATIONS = 8


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    sizes: TwoStageSettings
    num_conversations: int  # in a round
    file: str | None
    file_conversations: list[FileConversation] | None
    concurrency: int | None  # conversations at once; None: no limit
    request_rate: float  # conversations that begin in a second
    burstiness: float
    timeout: float

    @property
    def ignore_eos(self) -> bool:
        """Of a file, answers end where the model ends them."""
        return self.file_conversations is None

    def as_dict(self) -> dict[str, Any]:
        """For a report: without the conversations themselves, and JSON knows no infinity."""
        facts: dict[str, Any] = msgspec.to_builtins(self)
        del facts["file_conversations"]
        facts["request_rate"] = None if math.isinf(self.request_rate) else self.request_rate
        return facts


def http_settings_of(args: argparse.Namespace) -> HttpSettings:
    """RequestError, with the option's name, for invalid values."""
    if args.model is not None:
        raise RequestError("MODEL", f"{args.model!r}: the model is the server's", "--model NAME names one of several")
    refuse_engine_options(args)
    sizes = settings_of(args)
    at_least(args, "num_conversations", 1)
    for name in ("request_rate", "burstiness", "timeout"):
        above_zero(args, name)
    lines = None if args.file is None else read_conversations(args.file, sizes.stage1_tokens)
    if lines is not None and args.num_conversations is not None and args.num_conversations > len(lines):
        raise RequestError("--num-conversations", f"{args.num_conversations}, but {args.file} has {len(lines)}")
    count = args.num_conversations or (DEFAULT_CONVERSATIONS if lines is None else len(lines))
    return HttpSettings(
        sizes=sizes,
        num_conversations=count,
        file=args.file,
        file_conversations=None if lines is None else lines[:count],
        concurrency=sizes.requests if math.isinf(args.request_rate) else args.requests,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        timeout=args.timeout,
    )
