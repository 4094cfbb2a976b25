"""The line in the log: every ten seconds of work, and once more when it is done."""

from __future__ import annotations

import logging

import pytest

from ratoon.core.stats import PrefixCacheStats, SchedulerStats
from ratoon.observe.throughput import INTERVAL, ThroughputLog

BUSY = SchedulerStats(num_running=3, num_waiting=2, kv_usage=0.255, prefix_cache=PrefixCacheStats(queries=8, hits=1))
IDLE = SchedulerStats()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "ratoon.observe.throughput")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_has_the_form_that_vllm_gives_it(clock, lines):
    log = ThroughputLog(clock)
    log.record_engine(0, BUSY)
    log.record_tokens(0, 1000, 1)
    log.record_tokens(0, 0, 499)
    clock.now += 10
    log.write()
    assert lines() == [
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 50.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.5%, Prefix cache hit rate: 12.5%"
    ]


def test_nothing_is_said_without_work_but_for_one_last_line(clock, lines):
    log = ThroughputLog(clock)
    log.write()
    assert lines() == []
    log.record_engine(0, BUSY)
    for stats in (BUSY, IDLE, IDLE, IDLE):
        clock.now += 10
        log.record_engine(0, stats)
        log.write()
    assert len(lines()) == 2
    assert "Running: 0 reqs, Waiting: 0 reqs" in lines()[-1]
    log.record_tokens(0, 5, 5)  # a request that came and went between two lines
    log.write()
    log.write()
    assert len(lines()) == 3


def test_engines_have_lines_of_their_own(clock, lines):
    log = ThroughputLog(clock)
    log.record_tokens(1, 0, 20)
    log.record_tokens(0, 10, 0)
    clock.now += 10
    log.write()
    assert [line[:10] for line in lines()] == ["Engine 000", "Engine 001"]


def test_a_caller_without_a_timer_writes_when_it_is_time_and_at_the_end(clock, lines):
    log = ThroughputLog(clock)
    for _ in range(3):  # calls, with a long rest between them
        log.begin_work()
        for _ in range(4):
            clock.now += INTERVAL / 4
            log.record_engine(0, BUSY)
            log.record_tokens(0, 0, 10)
            log.write_when_due(idle=False)
        log.record_engine(0, IDLE)
        log.write_when_due(idle=True)
        clock.now += 1000
    # The first engine is known from its first step on: its first ten seconds begin there.
    assert [("Running: 3" in line, "throughput: 4.0" in line) for line in lines()] == [
        (True, True), (False, False), (True, True), (False, False),
    ]  # fmt: skip


def test_a_short_call_writes_nothing(clock, lines):
    log = ThroughputLog(clock)
    log.begin_work()
    log.record_engine(0, BUSY)
    log.record_tokens(0, 3, 10)
    clock.now += 1
    log.write_when_due(idle=False)
    log.record_engine(0, IDLE)
    log.write_when_due(idle=True)
    assert lines() == []
