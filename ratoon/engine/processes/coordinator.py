"""The coordinator of data-parallel engines: their queue figures, and the waves in which engines step together.

Engines of a dense model are independent of each other: each steps when it has work, and no wave is needed. Engines of a
model whose steps exchange data among all of them (a mixture of experts that are spread over the engines) must take the
same number of steps, so one without requests runs empty steps beside the others (`data_parallel_lockstep`). Their work
comes in waves: a wave begins with a request while all engines rest, and consists of rounds of equally many steps. At
the end of a round every engine reports whether it has work left, and waits. If one has, the coordinator starts the next
round on all of them; if none has, the wave is over.

Pure: no clock, no sockets. The client that has the engines' sockets tells it what happens, and sends what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.core.messages import DPWave, DPWaveReport
from ratoon.core.request import EngineCoreOutputs


@dataclass(slots=True)
class QueueFigures:
    """The figures that an engine reported after its last step."""

    num_running: int = 0  # branches in its batch
    num_waiting: int = 0


class DPCoordinator:
    def __init__(self, num_engines: int, lockstep: bool = False) -> None:
        self.lockstep = lockstep and num_engines > 1
        self.figures = [QueueFigures() for _ in range(num_engines)]
        self.wave = DPWave(0, 0)  # the round that was started last
        self._is_on = False
        self._waited_for: set[int] = set()  # engines that have not reported the end of the round
        self._has_work = False  # of those that have, or a request came meanwhile

    def add_engine(self) -> None:
        """Takes note of another engine, which steps by itself."""
        self.figures.append(QueueFigures())

    @property
    def wave_is_on(self) -> bool:
        return self._is_on

    def note_outputs(self, outputs: EngineCoreOutputs) -> None:
        stats = outputs.scheduler_stats
        if stats is not None:
            figures = self.figures[outputs.engine_index]
            figures.num_running, figures.num_waiting = stats.num_running, stats.num_waiting

    def request_sent(self) -> DPWave | None:
        """A request was handed to an engine. Returns the wave that all engines are to begin, if none is on."""
        if not self.lockstep:
            return None
        if self._is_on:
            self._has_work = True  # it may have missed its engine's report
            return None
        return self._start(DPWave(self.wave.wave + 1, 0))

    def reported(self, engine: int, report: DPWaveReport) -> DPWave | None:
        """An engine has ended a round. Returns the round that all engines are to begin, if this was the last to end,
        and there is work."""
        if not self._is_on or (report.wave, report.round) != (self.wave.wave, self.wave.round):
            return None  # of a wave that a death has ended
        self._waited_for.discard(engine)
        self._has_work |= report.has_work
        if self._waited_for:
            return None
        if self._has_work:
            return self._start(DPWave(self.wave.wave, self.wave.round + 1))
        self._is_on = False
        return None

    def engine_lost(self, engine: int) -> None:
        """An engine died: its figures are void, and the wave is over. The next begins with a request that is sent."""
        self.figures[engine] = QueueFigures()
        self._is_on = False

    def _start(self, wave: DPWave) -> DPWave:
        self.wave = wave
        self._is_on = True
        self._has_work = False
        self._waited_for = set(range(len(self.figures)))
        return wave
