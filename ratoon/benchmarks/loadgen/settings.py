"""Settings of a load run: resolved and checked once, before any request is sent."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

import msgspec

from ratoon.benchmarks.loadgen.datasets import LengthRange, Session, Shape, read_jsonl
from ratoon.core.errors import RequestError
from ratoon.core.prepared import prepared

LIMIT_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}
DEFAULT_NUM_REQUESTS = 100


class LoadSettings(msgspec.Struct, kw_only=True):
    dataset: str
    chat: bool
    shape: Shape
    file_sessions: list[Session] | None  # of a JSONL file
    request_rate: float
    burstiness: float
    concurrency: int | None
    think_time: float
    ignore_eos: bool
    fields: dict[str, Any]  # that every request gets
    limits_ms: dict[str, float]
    num_warmup: int
    repeat: int
    seed: int
    timeout: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings for a report: without the requests themselves, and without infinity, which JSON does not
        have."""
        facts: dict[str, Any] = msgspec.to_builtins(self)
        del facts["file_sessions"]
        facts["request_rate"] = None if math.isinf(self.request_rate) else self.request_rate
        return facts


def settings_of(args: argparse.Namespace) -> LoadSettings:
    """RequestError, with the option's name, for invalid values."""
    for name in ("num_requests", "concurrency", "repeat", "turns", "prefix_len", "prefix_groups"):
        at_least(args, name, 1)
    for name in ("warmup", "think_time"):
        at_least(args, name, 0)
    for name in ("request_rate", "burstiness", "timeout"):
        above_zero(args, name)
    output_len = parse_lengths("--output-len", args.output_len)
    sessions = _file_sessions(args, output_len)
    chat = _choose_chat(args, sessions)
    num_requests = args.num_requests or (len(sessions) if sessions else DEFAULT_NUM_REQUESTS)
    return LoadSettings(
        dataset=args.dataset,
        chat=chat,
        shape=Shape(
            num_requests=num_requests,
            input_len=parse_lengths("--input-len", args.input_len),
            output_len=output_len,
            prefix_len=args.prefix_len,
            num_groups=args.prefix_groups,
            num_turns=args.turns,
        ),
        file_sessions=sessions,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        concurrency=args.concurrency,
        think_time=args.think_time,
        ignore_eos=args.dataset != "jsonl" if args.ignore_eos is None else args.ignore_eos,
        fields={"temperature": args.temperature, **parse_fields(args.extra_body)},
        limits_ms=parse_limits(args.goodput or []),
        num_warmup=args.warmup,
        repeat=args.repeat,
        seed=args.seed,
        timeout=args.timeout,
    )


def parse_lengths(option: str, text: str) -> LengthRange:
    """A number of tokens, or two with a hyphen between them."""
    parts = text.split("-")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise RequestError(option, f"{text!r} is not a number of tokens", "such as 128, or 64-256")
    low, high = int(parts[0]), int(parts[-1])
    if low < 1 or high < low:
        raise RequestError(option, f"{text!r} is out of range", "at least 1, the smaller number first")
    return LengthRange(low, high)


def parse_limits(words: list[str]) -> dict[str, float]:
    """Limits in milliseconds from words such as ttft:500."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in LIMIT_NAMES or not (0 < limit < math.inf):
            raise RequestError("--goodput", f"{word!r} is not a limit", "such as ttft:500 tpot:50 e2e:10000 (ms)")
        limits[LIMIT_NAMES[name]] = limit
    return limits


def parse_fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=prepared(dict[str, Any]))
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RequestError("--extra-body", str(error), """a JSON object, such as '{"top_p": 0.9}'""") from None


def check_writable(option: str, path: str) -> None:
    """Checked before the run, so that its results are not lost."""
    folder = os.path.dirname(path) or "."
    touched = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(touched, os.W_OK):
        raise RequestError(option, f"{path!r} can't be written", "a file in a folder that exists")


def _file_sessions(args: argparse.Namespace, output_len: LengthRange) -> list[Session] | None:
    if (args.dataset == "jsonl") != (args.file is not None):
        raise RequestError("--file", "and --dataset jsonl belong together", "give both or neither")
    if args.file is None:
        return None
    sessions = read_jsonl(args.file, output_len.high)
    if args.num_requests is not None and args.num_requests > len(sessions):
        raise RequestError("--num-requests", f"{args.num_requests}, but {args.file} has {len(sessions)}")
    return sessions[: args.num_requests]


def _choose_chat(args: argparse.Namespace, sessions: list[Session] | None) -> bool:
    """Whether requests go to the chat endpoint: as asked, else where the dataset belongs."""
    has_messages = any(turn.messages is not None for session in sessions or () for turn in session)
    needs_chat = args.dataset == "multi-turn" or has_messages
    if args.endpoint is None:
        return needs_chat
    if args.endpoint == "completions" and needs_chat:
        raise RequestError("--endpoint", "completions do not support conversations", "chat for this dataset")
    has_ids = any(isinstance(turn.prompt, list) for session in sessions or () for turn in session)
    if args.endpoint == "chat" and has_ids:
        raise RequestError("--endpoint", "chat does not support prompts of token ids", "completions for this file")
    return bool(args.endpoint == "chat")


def at_least(args: argparse.Namespace, name: str, lowest: int) -> None:
    value = getattr(args, name)
    if value is not None and not value >= lowest:
        raise RequestError(f"--{name.replace('_', '-')}", f"{value} is out of range", f"at least {lowest}")


def above_zero(args: argparse.Namespace, name: str) -> None:
    value = getattr(args, name)
    if not value > 0:
        raise RequestError(f"--{name.replace('_', '-')}", f"{value} is out of range", "above 0")
