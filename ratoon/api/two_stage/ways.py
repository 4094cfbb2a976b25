"""The ways to get from stage 1 to stage 2: what is kept, what happens in between, what is sent. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Between(Enum):
    """What happens to the KV cache between the stages."""

    NOTHING = "nothing"
    FORGET = "forget"  # it is emptied
    FILL = "fill"  # other requests use all of it that is free


@dataclass(frozen=True, slots=True)
class Way:
    key: str
    label: str
    continues: bool  # stage 2 continues a leased parent; else the whole text is sent as a new request
    between: Between = Between.NOTHING


NO_REUSE = Way("no_reuse", "no reuse", continues=False, between=Between.FORGET)
PREFIX_CACHE = Way("prefix_cache", "prefix cache", continues=False)
CONTINUATION = Way("continuation", "continuation", continues=True)
HTTP_WAYS = (NO_REUSE, PREFIX_CACHE, CONTINUATION)  # a client can't empty or fill a server's memory
WAYS = (
    *HTTP_WAYS,
    Way("prefix_cache_under_pressure", "prefix cache, memory filled", continues=False, between=Between.FILL),
    Way("continuation_under_pressure", "continuation, memory filled", continues=True, between=Between.FILL),
)
