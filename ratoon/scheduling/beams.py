"""One beam search as a state machine: which candidates survive, which texts are finished, when it ends, the result.

The result is that of `generate(num_beams=…, do_sample=False)` in transformers, scores included. There is no model,
block or request here: callers compute the candidates of a step, and fork and prune branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ratoon.core.params import BeamSearchParams
from ratoon.core.request import FinishReason

# The tokens of a beam, as a linked list: the node of the tokens before, and the last token; None: no token yet. Beams
# share common nodes, and unreferenced nodes are freed automatically.
Node = tuple["Node", int] | None


class BeamMoves(NamedTuple):
    """The beams of the next step, best first: beam i is beam `parents[i]` of this step followed by `tokens[i]`."""

    parents: list[int]
    tokens: list[int]
    scores: list[float]  # sums of log-probabilities


class Hypothesis(NamedTuple):
    """A text. A stop token that ended it is its last token."""

    token_ids: list[int]
    score: float  # the sum of log-probabilities after the length penalty
    cumulative_logprob: float  # the sum itself
    finish_reason: FinishReason | None  # None: it is not finished


class Finished(NamedTuple):
    """A finished text before its tokens are collected, with its origin."""

    score: float
    cumulative_logprob: float
    node: Node
    finish_reason: FinishReason
    number: int  # unique in this search
    beam: int  # that it finished
    num_tokens: int


class BeamSearch:
    """Starts with one beam without tokens. In each step the caller passes the best candidates over all running beams to
    `advance`, and gets the beams of the next step, until `done`."""

    __slots__ = (
        "_finished",
        "_max_new_tokens",
        "_nodes",
        "_num_finished",
        "_num_tokens",
        "_params",
        "_stop_tokens",
        "done",
        "scores",
    )

    def __init__(self, params: BeamSearchParams, max_new_tokens: int) -> None:
        """`max_new_tokens`: limited by params.max_tokens and max_model_len; at least 1."""
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._stop_tokens = frozenset(params.all_stop_token_ids or ())
        self._num_tokens = 0  # of each running beam
        self._nodes: list[Node] = [None]  # of the running beams
        self._finished: list[Finished] = []  # best first, beam_width at most
        self._num_finished = 0  # including those replaced by better ones
        self.scores: list[float] = [0.0]  # of the running beams: sums of log-probabilities
        self.done = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens of each running beam, without the prompt."""
        return self._num_tokens

    @property
    def num_beams(self) -> int:
        return len(self._nodes)

    @property
    def num_candidates(self) -> int:
        """How many candidates a step needs so that at least `beam_width` do not end with a stop token."""
        return self._params.beam_width * (1 + len(self._stop_tokens))

    def advance(self, scores: Sequence[float], beams: Sequence[int], tokens: Sequence[int]) -> BeamMoves:
        """Take the best candidates of a step, best first: candidate i is running beam `beams[i]` followed by
        `tokens[i]`, and `scores[i]` is the sum of log-probabilities of both. At most `num_candidates`.
        """
        assert not self.done
        self._num_tokens += 1
        living, ending = self._divide(tokens, _num_possible(scores))
        if ending:
            self._finish(scores, beams, tokens, ending)
        moves = BeamMoves([beams[i] for i in living], [tokens[i] for i in living], [scores[i] for i in living])
        self.done = not living or self._nothing_to_gain(moves.scores[0])
        if self.done:
            moves = BeamMoves([], [], [])
        nodes = self._nodes
        self._nodes = [(nodes[parent], token) for parent, token in zip(moves.parents, moves.tokens)]
        self.scores = moves.scores
        return moves

    def _divide(self, tokens: Sequence[int], num_possible: int) -> tuple[Sequence[int], Sequence[int]]:
        """The candidates that survive and those that are finished, best first, as indices.

        Only the first `beam_width` can finish: a stop token further back ends a text that the search would have
        dropped. Candidates further back replace the finished ones.
        """
        leading = range(min(self._params.beam_width, num_possible))
        if self._num_tokens == self._max_new_tokens:
            return (), leading
        stop_tokens = self._stop_tokens
        if stop_tokens.isdisjoint(tokens):
            return leading, ()
        living = [i for i in range(num_possible) if tokens[i] not in stop_tokens]
        return living[: self._params.beam_width], [i for i in leading if tokens[i] in stop_tokens]

    def _finish(
        self, scores: Sequence[float], beams: Sequence[int], tokens: Sequence[int], ending: Sequence[int]
    ) -> None:
        """Keep those of the `ending` candidates that are among the best finished. Of equal ones the earlier stays."""
        divisor = self._divisor(self._num_tokens)
        finished = self._finished
        worst = finished[-1].score if self._is_full else -inf
        for i in ending:
            score = scores[i] / divisor
            if score <= worst:
                break  # later ones are no better
            reason = self._finish_reason(tokens[i])
            node = (self._nodes[beams[i]], tokens[i])
            finished.append(Finished(score, scores[i], node, reason, self._num_finished, beams[i], self._num_tokens))
            self._num_finished += 1
        finished.sort(key=_score_of, reverse=True)
        del finished[self._params.beam_width :]

    def _finish_reason(self, token: int) -> FinishReason:
        """A forced end token at the length limit counts as LENGTH."""
        is_forced = self._num_tokens == self._max_new_tokens and token in (self._params.forced_eos_token_id or ())
        return FinishReason.STOP if token in self._stop_tokens and not is_forced else FinishReason.LENGTH

    def _nothing_to_gain(self, best_running: float) -> bool:
        params = self._params
        if not self._is_full:
            return False
        if params.early_stopping is True:
            return True
        # With a penalty above 0 a longer text has a better score for the same sum, so the upper bound for "never" is
        # the best beam at full length without further loss.
        hopeful = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_new_tokens if hopeful else self._num_tokens
        return best_running / self._divisor(length) <= self._finished[-1].score

    @property
    def _is_full(self) -> bool:
        return len(self._finished) >= self._params.beam_width

    def _divisor(self, length: int) -> float:
        return float(length + self._params.num_forced_tokens) ** self._params.length_penalty

    def leading(self) -> list[Finished]:
        """The best finished texts so far, best first, `n` at most. Only a better one replaces one of them."""
        return self._finished[: self._params.n]

    def hypotheses(self) -> list[Hypothesis]:
        """The best finished texts, best first: `n` when the search is done.

        Fewer only if fewer texts exist: a grammar with few texts, or all tokens forbidden.
        """
        return [_gathered(found) for found in self.leading()]

    def best_so_far(self) -> Hypothesis | None:
        """The best text, finished or not: the first result if the search ended now. None: no token yet."""
        finished = self._finished[0] if self._finished else None
        if self._nodes and self._num_tokens:
            score = self.scores[0] / self._divisor(self._num_tokens)
            if finished is None or finished.score < score:
                return Hypothesis(self.running_token_ids(0), score, self.scores[0], None)
        return None if finished is None else _gathered(finished)

    def running_token_ids(self, beam: int) -> list[int]:
        """All tokens of a running beam, without the prompt."""
        return _tokens_of(self._nodes[beam])


def _gathered(found: Finished) -> Hypothesis:
    return Hypothesis(_tokens_of(found.node), found.score, found.cumulative_logprob, found.finish_reason)


def _score_of(finished: Finished) -> float:
    return finished.score


def _num_possible(scores: Sequence[float]) -> int:
    """How many candidates are not forbidden; those that are come last."""
    count = len(scores)
    while count and scores[count - 1] == -inf:
        count -= 1
    return count


def _tokens_of(node: Node) -> list[int]:
    token_ids = []
    while node is not None:
        node, token = node
        token_ids.append(token)
    token_ids.reverse()
    return token_ids
