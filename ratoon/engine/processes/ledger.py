"""The client's record of running requests, from which they continue in another process when theirs has died.

Every token is recorded before it is passed on. Replaying a request means sending it again with
its tokens, which are neither sent to the caller again nor changed. A beam search is sent as it was: it finds the same
texts again, and its intermediate outputs are replaced anyway. So is a request for hidden states: its rows start
from the first. Independent of sockets, processes and clocks.

An engine reads the hidden states that come with a text on its own when the text has ended. Their reading is recorded
like a request, and sent like one only if that engine has died.

A request can itself crash an engine, and most that are in an engine that dies did not. One that got further in it than
in any engine before is not the cause: it has received a token, or a step has computed more of it (`advanced`). The
others become suspects, which are admitted one at a time. A suspect that gets on is cleared. If the engine dies while it
is tried beside others that could be the cause, it is tried by itself next; if none of the others could be, it gets a
strike, as does a request that was alone in the engine. After three strikes it fails. The others are delayed, not lost.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from ratoon.core.params import SamplingParams
from ratoon.core.readings import asks_for_states, awaits_count, reading_of
from ratoon.core.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ResumedChoice,
)

MAX_STRIKES = 3


class Suspicion(enum.IntEnum):
    NONE = 0
    SOME = 1  # it is tried beside requests that are not suspected
    STRONG = 2  # it is tried by itself, beside those only that have progressed


class Entry:
    """One request: its fields, its outputs so far, and its engine."""

    __slots__ = ("choices", "engine", "furthest", "num_run", "progressed", "request", "strikes", "suspicion", "untold")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.choices = [ResumedChoice([]) for _ in range(request.num_choices)]
        self.engine: int | None = None  # None: it waits to be sent
        self.progressed = False  # it got further in its current engine than in any that died
        self.num_run = 0  # tokens computed in its current engine that are computed again if it dies
        self.furthest = 0  # the most of them in an engine that died
        self.suspicion = Suspicion.NONE
        self.strikes = 0  # deaths of which no other request could be the cause
        # Ended choices of which the front end has not told yet how many tokens count (`stop`), before their hidden
        # states are read; and whether the engine in which they ended is still there
        self.untold: dict[int, bool] = {}

    @property
    def finished(self) -> bool:
        return self.is_complete and not self.untold

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to generate."""
        return all(choice.finished for choice in self.choices)

    @property
    def begun(self) -> bool:
        """Whether there are tokens that must not change."""
        return isinstance(self.request.params, SamplingParams) and any(choice.token_ids for choice in self.choices)

    def current_request(self) -> EngineCoreRequest:
        """The request as it must be sent now."""
        if not self.begun:
            return self.request
        resumed = [ResumedChoice(choice.token_ids.copy(), choice.finished) for choice in self.choices]
        return msgspec.structs.replace(self.request, resumed=resumed)


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}  # by request id, in the order of arrival
        self._waiting: dict[str, Entry] = {}  # those of them without an engine
        self._tried: Entry | None = None  # the one suspect that is in an engine

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: EngineCoreRequest) -> None:
        entry = Entry(request)
        self._entries[request.request_id] = entry
        self._waiting[request.request_id] = entry

    def ready_to_go(self) -> list[Entry]:
        """The requests to send to an engine now: all that wait, but at most one suspect. For one under strong
        suspicion the others wait."""
        if self._tried is not None and self._tried.suspicion == Suspicion.STRONG:
            return []
        suspects = [entry for entry in self._waiting.values() if entry.suspicion]
        if not suspects:
            return list(self._waiting.values())
        if self._tried is None:
            chosen = min(suspects, key=lambda entry: entry.suspicion)  # the first of the least suspected
            if chosen.suspicion == Suspicion.STRONG:
                return [] if self._has_unproven() else [chosen]
            suspects.remove(chosen)
        held = {id(entry) for entry in suspects}
        return [entry for entry in self._waiting.values() if id(entry) not in held]

    def _has_unproven(self) -> bool:
        """Whether a request in an engine has not progressed there."""
        return any(entry.engine is not None and not entry.progressed for entry in self._entries.values())

    def handed_over(self, entry: Entry, engine: int) -> None:
        entry.engine = engine
        entry.progressed = False
        entry.num_run = 0
        del self._waiting[entry.request.request_id]
        if entry.suspicion:
            self._tried = entry

    def record(self, outputs: EngineCoreOutputs) -> list[Entry]:
        """Record an engine's outputs. Returns the entries that have ended."""
        ended = []
        for branch_id, num_tokens in outputs.advanced.items():
            found = self._find(branch_id)
            if found is not None:
                self._advance(found[0], num_tokens)
        for output in outputs.outputs:
            entry = self._entries.get(output.request_id)
            if entry is None or output.choice >= len(entry.choices):
                continue
            if output.replaces or not (output.new_token_ids or output.finished):
                self._advance(entry, 1)  # comes again in another engine
            elif not entry.progressed:
                self._clear(entry)
            choice = entry.choices[output.choice]
            if choice.finished:
                continue  # by a stop string, which the engine did not know of yet
            if output.replaces:
                choice.token_ids.clear()
            choice.token_ids.extend(output.new_token_ids)
            if output.num_texts is not None:
                del entry.choices[output.num_texts :]
            if output.finish_reason is None:
                continue
            choice.finished = True
            if asks_for_states(entry.request) and output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                if awaits_count(entry.request.params):
                    entry.untold[output.choice] = True
                else:
                    self._begin_reading(entry, output.choice, entry.engine)
            # Choices are forked from the first; if that one failed before it had a token, there will be no others.
            if entry.finished or (output.finish_reason == FinishReason.ERROR and not entry.begun):
                self._drop(entry)
                ended.append(entry)
        return ended

    def abort(self, ids: Iterable[str]) -> tuple[dict[int, list[str]], list[Entry]]:
        """Forget requests, or one choice of several (`id#choice`). Returns what must be aborted in which engine, and
        the entries that have ended with it."""
        to_send: dict[int, list[str]] = {}
        ended = []
        for some_id in ids:
            found = self._find(some_id)
            if found is None:
                continue
            entry, index = found
            entry.choices[index].finished = True
            if some_id in self._entries or entry.finished:
                self._drop(entry)
                ended.append(entry)
            if entry.engine is not None:
                to_send.setdefault(entry.engine, []).append(some_id)
        return to_send, ended

    def stop(self, stopped: Mapping[str, int | None]) -> tuple[dict[int, dict[str, int | None]], list[Entry]]:
        """Forgets branches that ended at a stop string. Each comes with the number of its tokens that count where
        hidden states are to be read. Returns what must be stopped in which engine, and the entries that have ended with
        it."""
        to_send: dict[int, dict[str, int | None]] = {}
        ended = []
        for branch_id, num_tokens in stopped.items():
            found = self._find(branch_id)
            if found is None:
                continue
            entry, index = found
            engine = entry.engine if entry.untold.pop(index, True) else None  # None: it died with this branch
            entry.choices[index].finished = True
            if num_tokens is not None:
                del entry.choices[index].token_ids[num_tokens:]
                self._begin_reading(entry, index, engine)
            if entry.is_complete:
                self._waiting.pop(entry.request.request_id, None)
            if entry.finished:
                self._drop(entry)
                ended.append(entry)
            if engine is not None:
                to_send.setdefault(engine, {})[branch_id] = num_tokens
        return to_send, ended

    def _find(self, branch_id: str) -> tuple[Entry, int] | None:
        """The request of a branch, and the branch's choice."""
        entry = self._entries.get(branch_id)
        if entry is not None:
            return entry, 0
        request_id, _, number = branch_id.rpartition("#")
        entry = self._entries.get(request_id)
        if entry is None or not number.isdecimal() or int(number) >= len(entry.choices):
            return None
        return entry, int(number)

    def _begin_reading(self, entry: Entry, choice: int, engine: int | None) -> None:
        """This engine begins to read the hidden states of a text. None: any engine is to do it."""
        request = reading_of(entry.request, choice, entry.choices[choice].token_ids)
        if request is None:
            return
        self.add(request)
        if engine is not None:
            self.handed_over(self._entries[request.request_id], engine)

    def engine_died(self, engine: int) -> list[EngineCoreOutput]:
        """All its requests wait again. Returns the final outputs of those that fail."""
        inside = [entry for entry in self._entries.values() if entry.engine == engine]
        unproven = [entry for entry in inside if not entry.progressed]
        tried, self._tried = self._tried, None
        if tried is not None and tried.engine != engine:
            self._tried, tried = tried, None
        for entry in unproven:
            is_alone = len(unproven) == 1 and (entry is tried or len(inside) == 1)
            entry.strikes += is_alone
            entry.suspicion = Suspicion.STRONG if is_alone or entry is tried else max(entry.suspicion, Suspicion.SOME)
        outputs = []
        self._take_back(inside)
        for entry in inside:
            if entry.strikes >= MAX_STRIKES:
                del self._entries[entry.request.request_id]
                outputs += _failures(
                    entry, f"the engine process died {entry.strikes} times while only this request could be the cause"
                )
        self._queue_again()
        return outputs

    def engine_left(self, engine: int) -> None:
        """All its requests wait again: it has ended, for none of their faults."""
        self._take_back([entry for entry in self._entries.values() if entry.engine == engine])
        if self._tried is not None and self._tried.engine is None:
            self._tried = None
        self._queue_again()

    def num_in(self, engine: int) -> int:
        return sum(entry.engine == engine for entry in self._entries.values())

    def _take_back(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.engine = None
            entry.furthest = max(entry.furthest, entry.num_run)
            entry.untold = dict.fromkeys(entry.untold, False)

    def _queue_again(self) -> None:
        """Queues a request in the order of arrival, before requests that arrived later."""
        self._waiting = {
            key: entry for key, entry in self._entries.items() if entry.engine is None and not entry.is_complete
        }

    def fail_all(self, message: str) -> list[EngineCoreOutput]:
        """Returns the final outputs of all requests, because no engine is left."""
        outputs = [output for entry in self._entries.values() for output in _failures(entry, message)]
        self._entries.clear()
        self._waiting.clear()
        self._tried = None
        return outputs

    def _advance(self, entry: Entry, num_tokens: int) -> None:
        """Counts tokens as progress unless they were computed before in another engine: a request that crashes engines
        gets as far in each of them."""
        entry.num_run += num_tokens
        if entry.num_run > entry.furthest and not entry.progressed:
            self._clear(entry)

    def _clear(self, entry: Entry) -> None:
        entry.progressed = True
        entry.suspicion, entry.strikes = Suspicion.NONE, 0
        if self._tried is entry:
            self._tried = None

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.request.request_id]
        self._waiting.pop(entry.request.request_id, None)
        if self._tried is entry:
            self._tried = None


def _failures(entry: Entry, message: str) -> list[EngineCoreOutput]:
    return [
        EngineCoreOutput(entry.request.request_id, [], index, FinishReason.ERROR, error=message)
        for index, choice in enumerate(entry.choices)
        if not choice.finished
    ]
