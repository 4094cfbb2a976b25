"""The client's record of running requests, from which they continue in another process when theirs has died.

Every token is recorded before it is passed on. Replaying a request means sending it again with
its tokens, which are neither sent to the caller again nor changed. A beam search is sent as it was: it finds the same
texts again, and its intermediate outputs are replaced anyway. So is a request for hidden states: its rows start
from the first. Independent of sockets, processes and clocks.

An engine reads the hidden states that come with a text on its own when the text has ended. Their reading is recorded
like a request, and sent like one only if that engine has died.

A request can itself crash an engine. So a request that was in an engine that died, and had received nothing from it, is
a suspect: suspects are admitted one at a time. When the engine dies again, the admitted one gets a strike, and those
that have never received anything: they may be the cause, and are suspects from then on.
After three strikes it fails; when it receives a token, or rows, it is cleared. The others are delayed, but not lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ratoon.core.params import SamplingParams
from ratoon.core.readings import asks_for_states, awaits_count, reading_of
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
    """One request: its fields, its outputs so far, and its engine."""

    __slots__ = ("choices", "engine", "ever_progressed", "progressed", "request", "strikes", "untold")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.choices = [ResumedChoice([]) for _ in range(request.num_choices)]
        self.engine: int | None = None  # None: it waits to be sent
        self.progressed = False  # has received something from its current engine
        self.ever_progressed = False  # from any engine
        self.strikes = 0
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

    @property
    def kind(self) -> EngineCoreRequestType:
        """The kind of the message that sends it."""
        is_extraction = isinstance(self.request.params, Extraction)
        return EngineCoreRequestType.HIDDEN_STATES_EXTRACT if is_extraction else EngineCoreRequestType.ADD

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
        self._suspect: Entry | None = None  # the one suspect that is in an engine

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: EngineCoreRequest) -> None:
        entry = Entry(request)
        self._entries[request.request_id] = entry
        self._waiting[request.request_id] = entry

    def ready_to_go(self) -> list[Entry]:
        """The requests to send to an engine now: all that wait, but at most one suspect."""
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
        """Record an engine's outputs. Returns the entries that have ended."""
        ended = []
        for output in outputs.outputs:
            entry = self._entries.get(output.request_id)
            if entry is None or output.choice >= len(entry.choices):
                continue
            if not entry.progressed or entry.strikes:
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
        """The same for branches that ended at a stop string, or of which it is told how many tokens count: a number
        where hidden states are to be read."""
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
        if self._suspect is not None and self._suspect.engine == engine:
            # One that has never received anything may be the cause as well: it has not been suspected yet.
            blamed = [entry for entry in inside if entry is self._suspect or not entry.ever_progressed]
            self._suspect = None
        else:
            blamed = [entry for entry in inside if not entry.progressed]
        for entry in blamed:
            entry.strikes += 1
        outputs = []
        for entry in inside:
            entry.engine = None
            entry.untold = dict.fromkeys(entry.untold, False)
            if entry.strikes >= MAX_STRIKES:
                del self._entries[entry.request.request_id]
                outputs += _failures(entry, f"the engine process died {entry.strikes} times while it had this request")
        # In the order of arrival, before requests that arrived later.
        self._waiting = {
            key: entry for key, entry in self._entries.items() if entry.engine is None and not entry.is_complete
        }
        return outputs

    def fail_all(self, message: str) -> list[EngineCoreOutput]:
        """No engine is left: the final outputs of all requests."""
        outputs = [output for entry in self._entries.values() for output in _failures(entry, message)]
        self._entries.clear()
        self._waiting.clear()
        self._suspect = None
        return outputs

    def _clear(self, entry: Entry) -> None:
        entry.progressed = entry.ever_progressed = True
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
