"""Figures: what was recorded is on the page, and what engines report keeps growing whatever becomes of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.outputs import RequestMetrics
from ratoon.core.stats import DraftStats, PrefixCacheStats, SchedulerStats
from ratoon.observe.metrics import EngineMetrics, Histogram, one_two_five
from ratoon.version import __version__


def page(metrics: EngineMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels, as a scraper reads them."""
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def of(samples: dict, name: str, **labels: str) -> float:
    return samples[f"ratoon_{name}", tuple(sorted(labels.items()))]


def stats(steps: int, **fields) -> SchedulerStats:
    return SchedulerStats(num_steps=steps, **fields)


def test_the_page_says_what_is_running():
    assert of(page(EngineMetrics("a model")), "engine_info", model="a model", version=__version__) == 1


def test_a_new_page_has_every_figure_at_zero():
    samples = page(EngineMetrics("m"))
    for name in ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"):
        assert of(samples, name) == 0
    for reason in ("stop", "length", "abort", "error", "refused"):
        assert of(samples, "requests_finished_total", reason=reason) == 0


def test_snapshots_of_engines_are_told_apart():
    metrics = EngineMetrics("m")
    metrics.record_engine(0, stats(5, num_running=3, num_waiting=2, kv_usage=0.25))
    metrics.record_engine(1, stats(7, num_preemptions=1, prefix_cache=PrefixCacheStats(queries=8, hits=2)))
    samples = page(metrics)
    assert of(samples, "requests_running", engine="0") == 3
    assert of(samples, "requests_waiting", engine="0") == 2
    assert of(samples, "kv_cache_usage_ratio", engine="0") == 0.25
    assert of(samples, "engine_steps_total", engine="1") == 7
    assert of(samples, "preemptions_total", engine="1") == 1
    assert of(samples, "prefix_cache_queries_total", engine="1") == 8
    assert of(samples, "prefix_cache_hits_total", engine="1") == 2
    assert of(samples, "prefix_cache_hit_ratio", engine="1") == 0.25


def test_counts_go_on_when_an_engine_starts_again():
    metrics = EngineMetrics("m")
    totals = []
    for steps, hits in [(1, 0), (10, 6), (10, 6), (1, 0), (4, 2)]:  # the process died behind the third
        metrics.record_engine(0, stats(steps, prefix_cache=PrefixCacheStats(queries=hits, hits=hits)))
        samples = page(metrics)
        totals.append(
            (of(samples, "engine_steps_total", engine="0"), of(samples, "prefix_cache_hits_total", engine="0"))
        )
    assert totals == [(1, 0), (10, 6), (10, 6), (11, 6), (14, 8)]


def test_drafts_are_counted_by_source_and_place_across_restarts_and_processes():
    metrics = EngineMetrics("m")
    for accepted in ([1], [3, 1], [1]):  # the process died behind the second
        drafts = DraftStats(drafts=4, draft_tokens=8, accepted_tokens=sum(accepted), accepted_per_pos=accepted)
        metrics.record_engine(0, stats(1, drafts={"ngram": drafts}))
    together = EngineMetrics("m")
    together.add(metrics.figures())
    together.add(metrics.figures())
    for page_of, times in ((page(metrics), 1), (page(together), 2)):
        assert of(page_of, "spec_decode_num_accepted_tokens_total", engine="0", source="ngram") == 5 * times
        per_place = "spec_decode_num_accepted_tokens_per_pos_total"
        assert of(page_of, per_place, engine="0", source="ngram", position="0") == 4 * times
        assert of(page_of, per_place, engine="0", source="ngram", position="1") == 1 * times


def test_times_of_a_request_that_ran_to_its_end():
    metrics = EngineMetrics("m")
    metrics.record_first_token(0.3, num_prompt_tokens=12)
    metrics.record_next_token(0.02)
    metrics.record_generated(5)
    times = RequestMetrics(10.0, 10.3, 12.3, 5, 10.05, 10.15, sampled_first_time=10.25, sampled_last_time=12.25)
    metrics.record_end("length", times, 12, 5)
    samples = page(metrics)
    assert of(samples, "prompt_tokens_total") == 12
    assert of(samples, "generation_tokens_total") == 5
    assert of(samples, "requests_finished_total", reason="length") == 1
    for name, total in [
        ("time_to_first_token_seconds", 0.3),
        ("inter_token_latency_seconds", 0.02),
        ("time_per_output_token_seconds", 0.5),
        ("e2e_request_latency_seconds", 2.3),
        ("request_queue_time_seconds", 0.1),
        ("request_prefill_time_seconds", 0.1),
        ("request_decode_time_seconds", 2.0),
        ("request_inference_time_seconds", 2.1),
        ("request_prompt_tokens", 12),
        ("request_generation_tokens", 5),
    ]:
        assert of(samples, f"{name}_count") == 1
        assert of(samples, f"{name}_sum") == pytest.approx(total)


def test_requests_that_were_cut_short_do_not_count_among_the_times():
    metrics = EngineMetrics("m")
    for reason in ("abort", "error"):
        metrics.record_end(reason, RequestMetrics(10.0, 10.3, 12.3, 5), 12, 5)
    metrics.record_refused()
    samples = page(metrics)
    assert of(samples, "e2e_request_latency_seconds_count") == 0
    assert [of(samples, "requests_finished_total", reason=reason) for reason in ("abort", "error", "refused")] == [
        1
    ] * 3


def test_a_vector_has_no_token_times():
    metrics = EngineMetrics("m")
    metrics.record_vector(7)
    metrics.record_end("stop", RequestMetrics(1.0, None, 2.0, queued_time=1.0, scheduled_time=1.5), 7, 0)
    samples = page(metrics)
    assert of(samples, "request_queue_time_seconds_sum") == 0.5
    assert of(samples, "request_prefill_time_seconds_count") == 0
    assert of(samples, "prompt_tokens_total") == 7
    assert of(samples, "e2e_request_latency_seconds_count") == 1
    assert of(samples, "request_generation_tokens_count") == 0


def test_answers_of_the_http_server_are_counted_by_route_and_status():
    metrics = EngineMetrics("m")
    for status in (200, 200, 400):
        metrics.record_http("/v1/completions", status)
    samples = page(metrics)
    assert of(samples, "http_requests_total", route="/v1/completions", status="200") == 2
    assert of(samples, "http_requests_total", route="/v1/completions", status="400") == 1


def test_health_is_asked_for_when_the_page_is_read():
    metrics = EngineMetrics("m")
    engines = [EngineHealth(0, EngineState.OK), EngineHealth(1, EngineState.RESTARTING, num_restarts=2)]
    metrics.watch(lambda: Health(engines))
    samples = page(metrics)
    assert [of(samples, "engine_up", engine=index) for index in "01"] == [1, 0]
    assert of(samples, "engine_restarts", engine="1") == 2
    engines[1] = EngineHealth(1, EngineState.OK, num_restarts=3, num_bad_messages=4)
    samples = page(metrics)
    assert of(samples, "engine_up", engine="1") == 1
    assert of(samples, "engine_restarts", engine="1") == 3
    assert of(samples, "engine_bad_messages", engine="1") == 4


def test_a_value_counts_in_the_first_bucket_that_holds_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    metrics = EngineMetrics("m")
    metrics.record_first_token(0.002, 1)
    metrics.record_first_token(1000.0, 1)
    samples = page(metrics)
    at = {bound: of(samples, "time_to_first_token_seconds_bucket", le=bound) for bound in ("0.001", "0.002", "+Inf")}
    assert at == {"0.001": 0, "0.002": 1, "+Inf": 2}


def test_buckets_grow_in_round_steps():
    assert one_two_five(-1, 1) == (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def test_prometheus_client_is_loaded_only_for_the_page():
    code = (
        "import sys; from ratoon.observe.metrics import EngineMetrics; metrics = EngineMetrics('m');"
        "metrics.record_first_token(1.0, 1); print('prometheus_client' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
