"""The client's record of requests under way: enough to let them go on in another process when theirs has died.

Every token that came in is written down before it is passed on. Replaying a request means handing it over again with
its tokens: they are neither sent nor changed a second time. A beam search is handed over as it was: it finds the same
texts again, and what it told before its end is replaced anyway. So is a request for hidden states: its rows come again
from the first. Knows no sockets, no processes and no clock.

A request can be what kills an engine. So whoever was in a dying engine without having got anything from it comes under
suspicion: suspects are let in one at a time, and only the one that is in is blamed when the engine dies again. Blamed
three times it fails; having got a token, or rows, it is cleared. The others lose time, but not their answers.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ratoon.core.params import SamplingParams
from ratoon.core.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    Extraction,
    FinishReason,
    ResumedChoice,
)

MAX_STRIKES = 3


class Entry:
    """One request: what it asked for, what it got, and where it is."""

    __slots__ = ("choices", "engine", "progressed", "request", "strikes")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.choices = [ResumedChoice([]) for _ in range(request.num_choices)]
        self.engine: int | None = None  # None: it waits to be handed over
        self.progressed = False  # has got something from the engine that it is in
        self.strikes = 0

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def begun(self) -> bool:
        """Are there tokens that must not change any more?"""
        return isinstance(self.request.params, SamplingParams) and any(choice.token_ids for choice in self.choices)

    @property
    def kind(self) -> EngineCoreRequestType:
        """What the message is that hands it over."""
        is_extraction = isinstance(self.request.params, Extraction)
        return EngineCoreRequestType.HIDDEN_STATES_EXTRACT if is_extraction else EngineCoreRequestType.ADD

    def current_request(self) -> EngineCoreRequest:
        """The request as it must be handed over now."""
        if not self.begun:
            return self.request
        resumed = [ResumedChoice(choice.token_ids.copy(), choice.finished) for choice in self.choices]
        return msgspec.structs.replace(self.request, resumed=resumed)


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}  # by request id, in the order of arrival
        self._waiting: dict[str, Entry] = {}  # of them, those that no engine has
        self._suspect: Entry | None = None  # the one suspect that is in an engine

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: EngineCoreRequest) -> None:
        entry = Entry(request)
        self._entries[request.request_id] = entry
        self._waiting[request.request_id] = entry

    def ready_to_go(self) -> list[Entry]:
        """Who should be handed to an engine now: everybody who waits, but of the suspects at most one."""
        chosen = []
        suspect_in = self._suspect is not None
        for entry in self._waiting.values():
            if entry.strikes:
                if suspect_in:
                    continue
                suspect_in = True
            chosen.append(entry)
        return chosen

    def handed_over(self, entry: Entry, engine: int) -> None:
        entry.engine = engine
        entry.progressed = False
        del self._waiting[entry.request.request_id]
        if entry.strikes:
            self._suspect = entry

    def record(self, outputs: EngineCoreOutputs) -> list[Entry]:
        """Write down what an engine sent. Returns the entries that have ended."""
        ended = []
        for output in outputs.outputs:
            entry = self._entries.get(output.request_id)
            if entry is None or output.choice >= len(entry.choices):
                continue
            self._clear(entry)
            choice = entry.choices[output.choice]
            if output.replaces:
                choice.token_ids.clear()
            choice.token_ids.extend(output.new_token_ids)
            if output.finish_reason is None:
                continue
            choice.finished = True
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
            entry = self._entries.get(some_id)
            if entry is None:
                request_id, _, number = some_id.rpartition("#")
                entry = self._entries.get(request_id)
                if entry is None or not number.isdecimal() or int(number) >= len(entry.choices):
                    continue
                entry.choices[int(number)].finished = True
                if entry.finished:
                    self._drop(entry)
                    ended.append(entry)
            else:
                self._drop(entry)
                ended.append(entry)
            if entry.engine is not None:
                to_send.setdefault(entry.engine, []).append(some_id)
        return to_send, ended

    def engine_died(self, engine: int) -> list[EngineCoreOutput]:
        """Everybody who was in it waits again. Returns the ends of those who are given up."""
        inside = [entry for entry in self._entries.values() if entry.engine == engine]
        if self._suspect is not None and self._suspect.engine == engine:
            blamed = [self._suspect]
            self._suspect = None
        else:
            blamed = [entry for entry in inside if not entry.progressed]
        for entry in blamed:
            entry.strikes += 1
        outputs = []
        for entry in inside:
            entry.engine = None
            if entry.strikes >= MAX_STRIKES:
                del self._entries[entry.request.request_id]
                outputs += _failures(entry, f"the engine process died {entry.strikes} times while it had this request")
        # In the order of arrival, in front of whoever came meanwhile.
        self._waiting = {key: entry for key, entry in self._entries.items() if entry.engine is None}
        return outputs

    def fail_all(self, message: str) -> list[EngineCoreOutput]:
        """There is no engine any more: the ends of all that is under way."""
        outputs = [output for entry in self._entries.values() for output in _failures(entry, message)]
        self._entries.clear()
        self._waiting.clear()
        self._suspect = None
        return outputs

    def _clear(self, entry: Entry) -> None:
        entry.progressed = True
        entry.strikes = 0
        if self._suspect is entry:
            self._suspect = None

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.request.request_id]
        self._waiting.pop(entry.request.request_id, None)
        if self._suspect is entry:
            self._suspect = None


def _failures(entry: Entry, message: str) -> list[EngineCoreOutput]:
    return [
        EngineCoreOutput(entry.request.request_id, [], index, FinishReason.ERROR, error=message)
        for index, choice in enumerate(entry.choices)
        if not choice.finished
    ]
