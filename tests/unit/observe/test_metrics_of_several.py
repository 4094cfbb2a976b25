"""Metrics of several processes are added up."""

import msgspec

from ratoon.core.outputs import RequestMetrics
from ratoon.core.stats import SchedulerStats
from ratoon.observe.metrics import EngineMetrics, MetricsFigures


def counted(num: int) -> EngineMetrics:
    metrics = EngineMetrics("model")
    for _ in range(num):
        metrics.record_first_token(0.3, 7)
        metrics.record_generated(2)
        metrics.record_end("stop", RequestMetrics(arrival_time=1.0, finished_time=2.5), 7, 2)
        metrics.record_http("/v1/models", 200)
        metrics.record_extraction(None, 3, 0.1)
    return metrics


def test_the_sum_of_two_is_what_one_would_have_counted():
    whole, total = counted(5), EngineMetrics("model")
    stats = SchedulerStats(num_running=2, num_steps=9, num_preemptions=4)
    whole.record_engine(1, stats)
    engines = EngineMetrics("model")
    engines.record_engine(1, stats)
    for part in (counted(2), counted(3), engines):
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(part.figures()), type=MetricsFigures)
        total.add(travelled)
    pages = [[line for line in one.render()[0].splitlines() if b"process_" not in line] for one in (whole, total)]
    assert pages[0] == pages[1] and b'ratoon_preemptions_total{engine="1"} 4.0' in pages[0]
