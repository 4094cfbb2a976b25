"""Counts the values in a JSON text before it is parsed.

A few bytes of JSON (an empty list, a short string) take tens of bytes once parsed, and a hundred times that where each
is reported as invalid. This module only counts, slice by slice; it does not validate.
"""

from __future__ import annotations

from typing import NamedTuple

SLICE = 64 * 1024  # bytes; counting needs memory for one slice only
SMALL_BODY = 64 * 1024  # bytes: below this size no limit can be exceeded
MAX_PARTS = 2**17  # texts (keys included), lists and objects
MAX_OTHER_VALUES = 2**18  # entries of lists and objects other than token ids of prompts


class ExtentLimit(NamedTuple):
    num_parts: int
    num_values: int  # entries of all lists and objects


def extent_limit(max_prompts: int, max_model_len: int, vocab_size: int) -> ExtentLimit:
    """The limit that no valid request exceeds: every prompt as token ids, a list of all tokens, and the rest."""
    return ExtentLimit(MAX_PARTS, max_prompts * max_model_len + vocab_size + MAX_OTHER_VALUES)


def find_excess(body: bytes, limit: ExtentLimit) -> str | None:
    """The limit that is exceeded, or None. Stops at the first slice that exceeds it."""
    if len(body) <= SMALL_BODY:
        return None
    num_containers = num_marks = num_values = start = 0
    while start < len(body):
        end = start + SLICE
        piece = body[start:end]
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # ends within an escape
                end += 1
                piece = body[start:end]
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        start = end
        pieces = piece.split(b'"')
        structure = b"".join(pieces[num_marks % 2 :: 2])  # what is outside of strings
        num_marks += len(pieces) - 1
        num_containers += structure.count(b"[") + structure.count(b"{")
        num_values += structure.count(b",")
        if num_containers + num_marks // 2 > limit.num_parts:
            return f"{limit.num_parts} texts, lists and objects"
        if num_values > limit.num_values:
            return f"{limit.num_values} values"
    return None
