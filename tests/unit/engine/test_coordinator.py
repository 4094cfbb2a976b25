"""The coordinator of data-parallel engines: queue figures, and waves in which engines step together."""

from ratoon.core.messages import DPWave, DPWaveReport
from ratoon.core.request import EngineCoreOutputs
from ratoon.core.stats import SchedulerStats
from ratoon.engine.processes.coordinator import DPCoordinator, QueueFigures


def report(wave: DPWave, has_work: bool) -> DPWaveReport:
    return DPWaveReport(wave.wave, wave.round, has_work)


def test_engines_that_are_independent_have_no_waves():
    for coordinator in (DPCoordinator(3), DPCoordinator(1, lockstep=True)):
        assert coordinator.request_sent() is None
        assert not coordinator.lockstep and not coordinator.wave_is_on


def test_a_wave_goes_on_while_one_engine_has_work_and_ends_when_none_has():
    coordinator = DPCoordinator(2, lockstep=True)
    first = coordinator.request_sent()
    assert first == DPWave(1, 0) and coordinator.wave_is_on
    assert coordinator.reported(0, report(first, has_work=True)) is None, "engine 1 has not ended the round"
    second = coordinator.reported(1, report(first, has_work=False))
    assert second == DPWave(1, 1)
    assert coordinator.reported(0, report(second, has_work=False)) is None
    assert coordinator.reported(1, report(second, has_work=False)) is None
    assert not coordinator.wave_is_on
    assert coordinator.request_sent() == DPWave(2, 0)


def test_a_request_that_comes_behind_its_engines_report_is_not_forgotten():
    coordinator = DPCoordinator(2, lockstep=True)
    wave = coordinator.request_sent()
    coordinator.reported(0, report(wave, has_work=False))
    assert coordinator.request_sent() is None, "the wave is on"
    assert coordinator.reported(1, report(wave, has_work=False)) == DPWave(1, 1)


def test_a_death_ends_the_wave_and_late_reports_of_it_count_for_nothing():
    coordinator = DPCoordinator(2, lockstep=True)
    old = coordinator.request_sent()
    coordinator.engine_lost(1)
    assert not coordinator.wave_is_on
    new = coordinator.request_sent()
    assert new.wave > old.wave
    assert coordinator.reported(0, report(old, has_work=False)) is None
    assert coordinator.reported(1, report(new, has_work=True)) is None, "engine 0 still runs the new round"
    assert coordinator.reported(0, report(new, has_work=False)) == DPWave(new.wave, 1)


def test_figures_are_those_of_the_last_step_and_go_with_the_engine():
    coordinator = DPCoordinator(2)
    stats = SchedulerStats(num_running=3, num_waiting=2)
    coordinator.note_outputs(EngineCoreOutputs([], stats, engine_index=1))
    coordinator.note_outputs(EngineCoreOutputs([], engine_index=1))  # an output that no step brought
    assert coordinator.figures == [QueueFigures(), QueueFigures(3, 2)]
    coordinator.engine_lost(1)
    assert coordinator.figures == [QueueFigures(), QueueFigures()]
