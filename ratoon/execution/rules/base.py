"""The interface of a rule over logits, the rules of one row, and applying those of many rows to a batch of logits.

A rule is immutable: `after(token)` returns another one. So forks and beams share rules, a rejected draft returns to the
rule before it, and a resumed branch rebuilds its rules from its tokens alone. rules/build.py decides which rules a
request has.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, ClassVar

import numpy as np
import torch

from ratoon.execution.inputs.cells import cells
from ratoon.layers import sampling

Tensor = torch.Tensor


class Stage(enum.IntEnum):
    """The fixed order in which rules change logits. Rules of one stage have one `apply`, and are applied together.

    Masks come first. Timestamps are the last of them, because they compare the probabilities of tokens still possible.
    A forced token overrides rules that forbid it. Bias and penalties follow, in vLLM's order. What is typical is
    looked for in what they leave.
    """

    GRAMMAR = 0
    ALLOW = 1
    FORBID = 2
    TIMESTAMPS = 3
    FORCE = 4
    BIAS = 5
    PENALTIES = 6
    TYPICAL = 7

    @property
    def changes_values(self) -> bool:
        """Whether it changes logits of tokens that stay possible; masks do not."""
        return self >= Stage.FORCE


class Reads(enum.IntEnum):
    """What a rule depends on as the text grows."""

    NOTHING = 0  # constant: `after` returns the rule itself
    LENGTH = 1  # the number of tokens: `after` accepts any value for a pending token
    TOKENS = 2  # `after` needs the token, on the host


class LogitsRule:
    """A rule of one sequence. The cost of every method but `apply` is independent of the sequence's length."""

    __slots__ = ()
    stage: ClassVar[Stage]

    @property
    def reads(self) -> Reads:
        return Reads.NOTHING

    @property
    def is_active(self) -> bool:
        """Whether it changes anything for the next token."""
        return True

    def after(self, token_id: int) -> LogitsRule | None:
        """The rule once this token has been added. None: it will never be active again."""
        return self

    @staticmethod
    def apply(logits: Tensor, rows: np.ndarray, rules: Sequence[Any]) -> None:
        """Change logits [R, V] in place: `rules` are active and of one stage, and rules[i] applies to row rows[i]. Rows
        are ascending; a row with several rules of the stage occurs several times."""
        raise NotImplementedError


class ForbiddingRule(LogitsRule):
    """Forbids some tokens as the next one."""

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
        """The rules that change something for the next token."""
        return [rule for rule in self if rule.is_active]

    @property
    def reads(self) -> Reads:
        return max((rule.reads for rule in self), default=Reads.NOTHING)

    @property
    def needs_token_on_host(self) -> bool:
        """Whether a sampled token must be on the host before the next one is sampled. For a sampler on the device."""
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
