"""What every rule over logits is, all rules of one row together, and how those of many rows change a batch of logits.

A rule is a value: `after(token)` is another one, and the first stays what it was. So forks and beams share rules, a
rejected draft goes back to the rule before it, and a branch that is replayed rebuilds its rules from its tokens alone.
Which rules a request asks for is decided in rules/build.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, ClassVar

import numpy as np
import torch

from ratoon.execution.cells import cells
from ratoon.layers import sampling

Tensor = torch.Tensor


class Stage(enum.IntEnum):
    """The fixed order in which rules change logits. Rules of one stage have one `apply`, and are applied together.

    Masks come first. Timestamps are the last of them: they weigh what is still possible. A forced token goes before all
    that forbids it. Bias and penalties work on what is left, in vLLM's order.
    """

    ALLOW = 0
    FORBID = 1
    TIMESTAMPS = 2
    FORCE = 3
    BIAS = 4
    PENALTIES = 5

    @property
    def changes_values(self) -> bool:
        """Masks keep the logits of the tokens that they leave possible; the others do not."""
        return self >= Stage.FORCE


class Reads(enum.IntEnum):
    """What of a growing text a rule looks at."""

    NOTHING = 0  # it is the same at every step: `after` gives the rule itself
    LENGTH = 1  # it counts tokens: `after` takes any number for a token that is not known yet
    TOKENS = 2  # `after` needs the token, on the host


class LogitsRule:
    """Over one sequence. No method but `apply` takes time that grows with the sequence."""

    __slots__ = ()
    stage: ClassVar[Stage]

    @property
    def reads(self) -> Reads:
        return Reads.NOTHING

    @property
    def is_active(self) -> bool:
        """Does it change anything for the next token?"""
        return True

    def after(self, token_id: int) -> LogitsRule | None:
        """The rule once this token has been added. None: it will never be active again."""
        return self

    @staticmethod
    def apply(logits: Tensor, rows: np.ndarray, rules: Sequence[Any]) -> None:
        """Change logits [R, V] in place: `rules` are active and of one stage, and rules[i] is about row rows[i]. Rows
        rise; one comes several times where it has several rules of the stage."""
        raise NotImplementedError


class ForbiddingRule(LogitsRule):
    """Says which tokens may not come next."""

    __slots__ = ()
    stage = Stage.FORBID

    def forbidden(self) -> Sequence[int] | np.ndarray:
        raise NotImplementedError

    @property
    def is_active(self) -> bool:
        return len(self.forbidden()) > 0

    @staticmethod
    def apply(logits: Tensor, rows: np.ndarray, rules: Sequence[ForbiddingRule]) -> None:
        sampling.forbid_tokens(logits, *cells(logits, rows, [rule.forbidden() for rule in rules]))


class RowRules(tuple[LogitsRule, ...]):
    """All rules of one row."""

    __slots__ = ()

    def after(self, token_id: int) -> RowRules:
        return RowRules([next_rule for rule in self if (next_rule := rule.after(token_id)) is not None])

    def after_all(self, token_ids: Iterable[int]) -> RowRules:
        return reduce(RowRules.after, token_ids, self)

    def active(self) -> list[LogitsRule]:
        """Those that change something for the next token."""
        return [rule for rule in self if rule.is_active]

    @property
    def reads(self) -> Reads:
        return max((rule.reads for rule in self), default=Reads.NOTHING)

    @property
    def needs_token_on_host(self) -> bool:
        """Must a sampled token be on the host before the next one is sampled? A sampler on the device asks."""
        return self.reads is Reads.TOKENS


NO_RULES = RowRules()


def apply_rules(logits: Tensor, rules_of_rows: Sequence[Sequence[LogitsRule]]) -> None:
    """Change logits [R, V] in place by the active rules of each row, in the order of the stages."""
    stages: list[tuple[list[int], list[LogitsRule]]] = [([], []) for _ in Stage]
    for row, rules in enumerate(rules_of_rows):
        for rule in rules:
            of_stage = stages[rule.stage]
            of_stage[0].append(row)
            of_stage[1].append(rule)
    for rows, rules in stages:
        if rules:
            rules[0].apply(logits, np.array(rows), rules)
