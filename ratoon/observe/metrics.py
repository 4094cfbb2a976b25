"""Metrics for Prometheus: latencies of requests, reports of the engines, answers of the HTTP server.

Events come in on one event loop, thousands a second, so they are plain additions to plain numbers: an observation of
prometheus_client's own Histogram takes six times as long (a lock, and a walk over its buckets). Names, types and the
page are the library's, through its interface for collectors; it is imported when the page is first requested.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ratoon.core.health import EngineState, Health
from ratoon.core.outputs import RequestMetrics
from ratoon.core.stats import DraftStats, SchedulerStats
from ratoon.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Values: TypeAlias = Mapping[tuple[str, ...], float]  # by the values of the labels

NAMESPACE = "ratoon"
REFUSED = "refused"  # beside the finish reasons: a request that could never be served
AS_ASKED = ("stop", "length")  # reasons of requests that ran to their own end: only these say how long requests take
REASONS = (*AS_ASKED, "abort", "error", REFUSED)
SOURCES = ("lease", "prefix_cache", "recomputed", "host", "files")  # of what continuations begin with
PROMPT = "prompt"  # beside them, for hidden states: of a prompt of their own

# Of each engine: the name, the help, and where a snapshot has it.
ENGINE_GAUGES: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
    ("requests_running", "Sequences in the running batch.", attrgetter("num_running")),
    ("requests_waiting", "Sequences that wait for a place.", attrgetter("num_waiting")),
    ("kv_cache_usage_ratio", "Share of the KV cache's blocks in use.", attrgetter("kv_usage")),
    ("prefix_cache_hit_ratio", "Share of prompt tokens that were cached.", attrgetter("prefix_cache.hit_rate")),
    ("leases_active", "Ended sequences whose memory is kept.", attrgetter("leases.num_active")),
    ("lease_blocks", "Blocks of the KV cache that leases hold.", attrgetter("leases.num_blocks")),
    ("leases_in_host_memory", "Leases that moved to host memory.", attrgetter("leases.num_in_host_memory")),
    ("leases_in_files", "Leases that moved on to files.", attrgetter("leases.num_in_files")),
    ("sessions", "Sessions whose newest texts are known.", attrgetter("sessions.num_sessions")),
    ("session_roots", "Newest texts of these sessions.", attrgetter("sessions.num_roots")),
    ("kv_store_blocks", "Blocks of the KV cache that host memory has by hash.", attrgetter("store.num_blocks")),
    ("adapter_slots", "Slots for adapters (LoRA) in the engine's memory.", attrgetter("adapters.num_slots")),
    ("adapters_loaded", "Slots that have an adapter.", attrgetter("adapters.num_loaded")),
    ("adapter_requests_waiting", "Requests that wait for their adapter.", attrgetter("adapters.num_waiting")),
    ("cuda_graphs", "CUDA graphs of small steps that were captured.", attrgetter("graphs.num_graphs")),
    ("cuda_graph_bytes", "Device memory that CUDA graphs take.", attrgetter("graphs.num_bytes")),
    ("cuda_graph_capture_seconds", "Time that capturing CUDA graphs took.", attrgetter("graphs.seconds")),
)
ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", attrgetter("prefix_cache.queries")),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", attrgetter("prefix_cache.hits")),
    ("preemptions", "Sequences that were preempted.", attrgetter("num_preemptions")),
    ("kv_store_stored_blocks", "Blocks that were copied to host memory.", attrgetter("store.stored")),
    ("kv_store_loaded_blocks", "Blocks that were copied back from host memory.", attrgetter("store.loaded")),
    ("kv_store_failed_blocks", "Blocks that could not be copied, and were computed again.", attrgetter("store.failed")),
    ("engine_steps", "Steps of the engine.", attrgetter("num_steps")),
    ("encoder_runs", "Encoder inputs that were run.", attrgetter("num_encoder_runs")),
    ("adapter_loads", "Adapters that were read into a slot.", attrgetter("adapters.loads")),
    ("adapter_load_failures", "Adapters that could not be read.", attrgetter("adapters.failed")),
    ("adapter_evictions", "Adapters that gave their slot to another one.", attrgetter("adapters.evicted")),
    ("adapter_load_seconds", "Time from the request for an adapter to its slot.", attrgetter("adapters.seconds")),
    ("leases_granted", "Leases that began.", attrgetter("leases.granted")),
    ("leases_refused", "Leases too large for all that leases may hold.", attrgetter("leases.refused")),
    ("leases_expired", "Leases that ended at their time.", attrgetter("leases.expired")),
    ("leases_evicted", "Leases that were evicted.", attrgetter("leases.evicted")),
    ("leases_moved", "Leases that gave way, and moved to host memory or files.", attrgetter("leases.moved")),
    ("session_roots_superseded", "Texts of sessions that later ones contain.", attrgetter("sessions.superseded")),
)


# Of each engine and source of drafts: the help, and the labels beside the engine
DRAFT_COUNTERS: dict[str, tuple[str, ...]] = {
    "spec_decode_num_drafts": ("Drafts of next tokens that steps have checked.", "source"),
    "spec_decode_num_draft_tokens": ("Tokens of these drafts.", "source"),
    "spec_decode_num_accepted_tokens": ("Of these, those that were accepted.", "source"),
    "spec_decode_num_accepted_tokens_per_pos": ("The same by place in the draft.", "source", "position"),
}


# The same of each layer and expert of a mixture, where they are counted
EXPERT_COUNTERS: dict[str, tuple[str, ...]] = {
    "expert_rows": ("Rows that a layer's router sent to an expert.", "layer", "expert"),
}


def _draft_counts(source: str, drafts: DraftStats) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields the counts of a source, with the name and the labels of each."""
    yield ("spec_decode_num_drafts", source), drafts.drafts
    yield ("spec_decode_num_draft_tokens", source), drafts.draft_tokens
    yield ("spec_decode_num_accepted_tokens", source), drafts.accepted_tokens
    for place, count in enumerate(drafts.accepted_per_pos):
        yield ("spec_decode_num_accepted_tokens_per_pos", source, str(place)), count


def one_two_five(lowest: int, highest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … from 10^lowest to 10^highest."""
    steps = [float(f"{digit}e{power}") for power in range(lowest, highest) for digit in (1, 2, 5)]
    return (*steps, float(f"1e{highest}"))


class Histogram:
    """Values counted by size."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds  # highest value of each bucket; above the last there is one more
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class GrowingCount:
    """Sums up a count that is reported now and then, and that starts at 0 again in a new process."""

    __slots__ = ("_last", "total")

    def __init__(self) -> None:
        self.total: float = 0
        self._last: float = 0

    def update(self, count: float) -> None:
        self.total += count - self._last if count >= self._last else count
        self._last = count


class EngineCounts(msgspec.Struct, array_like=True):
    """The report of one engine, as it travels between processes."""

    newest: SchedulerStats
    sums: dict[str, float]


class MetricsFigures(msgspec.Struct):
    """All that an EngineMetrics has counted, to be added to another's."""

    counts: dict[str, int]
    by_label: dict[str, dict[str, int]]
    http: list[tuple[str, int, int]]  # route, status, count
    histograms: dict[str, tuple[list[int], float]]  # counts by bucket, and the sum
    engines: dict[int, EngineCounts] = {}


COUNTS = ("num_prompt_tokens", "num_generation_tokens", "num_extraction_rows")
LABELLED = ("finished", "continuations", "extractions")
HISTOGRAMS = (
    "time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency", "request_queue_time",
    "request_prefill_time", "request_decode_time", "request_inference_time", "request_prompt_tokens",
    "request_generation_tokens", "extraction_time",
)  # fmt: skip


class EngineFigures:
    """What one engine reported: its newest snapshot, and sums that outlive its process."""

    __slots__ = ("newest", "sums")

    def __init__(self) -> None:
        self.newest = SchedulerStats()
        self.sums = {name: GrowingCount() for name, _, _ in ENGINE_COUNTERS}

    def update(self, stats: SchedulerStats) -> None:
        self.newest = stats
        for name, _, read in ENGINE_COUNTERS:
            self.sums[name].update(read(stats))
        for source, drafts in stats.drafts.items():
            for labels, count in _draft_counts(source, drafts):
                self.sums.setdefault("|".join(labels), GrowingCount()).update(count)
        for layer, counts in stats.experts.items():
            for expert, count in enumerate(counts):
                self.sums.setdefault(f"expert_rows|{layer}|{expert}", GrowingCount()).update(count)


class EngineMetrics:
    """Collects; `render` gives the page that Prometheus reads. Not safe across threads: use it on the event loop.

    The `record_…` methods are called for what happens, and cost well under a microsecond each.
    """

    def __init__(self, model_name: str, pid: int | None = None) -> None:
        """`pid`: the process whose memory and time the page shows; None: this one."""
        self.model_name = model_name
        self._pid = pid
        self.engines: dict[int, EngineFigures] = {}
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished = Counter(dict.fromkeys(REASONS, 0))  # by reason
        self.continuations = Counter(dict.fromkeys(SOURCES, 0))  # by source
        self.extractions = Counter(dict.fromkeys((*SOURCES, PROMPT), 0))  # by source
        self.num_extraction_rows = 0
        self.http_requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.time_to_first_token = Histogram(one_two_five(-3, 2))
        self.inter_token_latency = Histogram(one_two_five(-4, 1))
        self.time_per_output_token = Histogram(one_two_five(-4, 1))
        self.e2e_request_latency = Histogram(one_two_five(-2, 3))
        self.request_queue_time = Histogram(one_two_five(-3, 2))
        self.request_prefill_time = Histogram(one_two_five(-3, 2))
        self.request_decode_time = Histogram(one_two_five(-2, 3))
        self.request_inference_time = Histogram(one_two_five(-2, 3))
        self.request_prompt_tokens = Histogram(one_two_five(0, 6))
        self.request_generation_tokens = Histogram(one_two_five(0, 6))
        self.extraction_time = Histogram(one_two_five(-3, 2))
        self._health: Callable[[], Health] = Health
        self._adapter_names: Callable[[], Mapping[str, str]] = dict
        self._registry: CollectorRegistry | None = None

    # ---- events ----

    def record_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """A request got its first token, so long after it arrived."""
        self.time_to_first_token.observe(seconds)
        self.num_prompt_tokens += num_prompt_tokens

    def record_next_token(self, seconds: float) -> None:
        """A request got its next token, or the next one of each of its choices."""
        self.inter_token_latency.observe(seconds)

    def record_generated(self, num_tokens: int) -> None:
        self.num_generation_tokens += num_tokens

    def record_continuation(self, source: str) -> None:
        """A continuation got its first token; what it inherited came from there."""
        self.continuations[source] += 1

    def record_vector(self, num_prompt_tokens: int) -> None:
        """A pooling request got its vector."""
        self.num_prompt_tokens += num_prompt_tokens

    def record_extraction(self, source: str | None, num_rows: int, seconds: float) -> None:
        """Hidden states were read out, so long after they were asked for, and so many rows were run for it. `source` is
        where an earlier request's memory came from; None: they are of a prompt of their own."""
        self.extractions[PROMPT if source is None else source] += 1
        self.num_extraction_rows += num_rows
        self.extraction_time.observe(seconds)

    def record_reason(self, reason: str) -> None:
        """A request ended without further measurements."""
        self.finished[reason] += 1

    def record_end(
        self, reason: str, metrics: RequestMetrics, num_prompt_tokens: int, num_tokens_of_longest_choice: int
    ) -> None:
        """A request ended, with this finish reason."""
        self.record_reason(reason)
        if reason not in AS_ASKED or metrics.finished_time is None:
            return
        self.e2e_request_latency.observe(metrics.finished_time - metrics.arrival_time)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self._record_engine_times(metrics)
        if metrics.first_token_time is None:  # it was asked for a vector
            return
        self.request_generation_tokens.observe(metrics.num_generation_tokens)
        if num_tokens_of_longest_choice > 1:
            seconds = metrics.finished_time - metrics.first_token_time
            self.time_per_output_token.observe(seconds / (num_tokens_of_longest_choice - 1))

    def _record_engine_times(self, metrics: RequestMetrics) -> None:
        """What the engine knows: a vector has no first token, and what was resumed from another process may have no
        beginning."""
        for histogram, seconds in (
            (self.request_queue_time, metrics.queue_time),
            (self.request_prefill_time, metrics.prefill_time),
            (self.request_decode_time, metrics.decode_time),
            (self.request_inference_time, metrics.inference_time),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def record_refused(self) -> None:
        """A request was refused, here or by the engine."""
        self.finished[REFUSED] += 1

    def record_engine(self, index: int, stats: SchedulerStats) -> None:
        """An engine's snapshot after a step."""
        figures = self.engines.get(index)
        if figures is None:
            figures = self.engines[index] = EngineFigures()
        figures.update(stats)

    def record_http(self, route: str, status: int) -> None:
        """An HTTP request was answered. `route` is the pattern, not the path: its values must be few."""
        self.http_requests[route, status] += 1

    def watch(self, health: Callable[[], Health]) -> None:
        """Called for the engines' health whenever the page is read."""
        self._health = health

    def name_adapters(self, names: Callable[[], Mapping[str, str]]) -> None:
        """Called for the names of adapters, by their digests, whenever the page is read."""
        self._adapter_names = names

    # ---- figures of several processes ----

    def figures(self) -> MetricsFigures:
        """Returns what was counted so far."""
        return MetricsFigures(
            counts={name: getattr(self, name) for name in COUNTS},
            by_label={name: dict(getattr(self, name)) for name in LABELLED},
            http=[(route, status, count) for (route, status), count in self.http_requests.items()],
            histograms={name: (list(one.counts), one.total) for name in HISTOGRAMS for one in [getattr(self, name)]},
            engines={
                index: EngineCounts(one.newest, {name: count.total for name, count in one.sums.items()})
                for index, one in self.engines.items()
            },
        )

    def add(self, figures: MetricsFigures) -> None:
        """Adds what another process has counted."""
        for name, count in figures.counts.items():
            setattr(self, name, getattr(self, name) + count)
        for name, labels in figures.by_label.items():
            getattr(self, name).update(labels)
        for route, status, count in figures.http:
            self.http_requests[route, status] += count
        for name, (counts, total) in figures.histograms.items():
            histogram: Histogram = getattr(self, name)
            histogram.counts = [a + b for a, b in zip(histogram.counts, counts)]
            histogram.total += total
        for index, reported in figures.engines.items():
            engine = self.engines.setdefault(index, EngineFigures())
            engine.newest = reported.newest
            for name, total in reported.sums.items():
                engine.sums.setdefault(name, GrowingCount()).total += total

    # ---- the page ----

    @property
    def registry(self) -> CollectorRegistry:
        if self._registry is None:
            from prometheus_client import CollectorRegistry, ProcessCollector

            self._registry = CollectorRegistry()
            self._registry.register(self)
            ProcessCollector(pid=lambda: "self" if self._pid is None else self._pid, registry=self._registry)
        return self._registry

    def render(self) -> tuple[bytes, str]:
        """The page and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for: everything, in prometheus_client's terms."""
        from prometheus_client.metrics_core import InfoMetricFamily

        facts = {"model": self.model_name, "version": __version__}
        yield InfoMetricFamily(f"{NAMESPACE}_engine", "What is running.", facts)
        yield from self._engine_metrics()
        yield from self._health_metrics()
        finished: Values = {(reason,): count for reason, count in self.finished.items()}
        continuations: Values = {(source,): count for source, count in self.continuations.items()}
        extractions: Values = {(source,): count for source, count in self.extractions.items()}
        rows: Values = {(): self.num_extraction_rows}
        http: Values = {(route, str(status)): count for (route, status), count in self.http_requests.items()}
        yield _counter("prompt_tokens", "Prompt tokens of requests that were begun.", {(): self.num_prompt_tokens})
        yield _counter("generation_tokens", "Generated tokens.", {(): self.num_generation_tokens})
        yield _counter("requests_finished", "Requests that ended, by reason.", finished, "reason")
        yield _counter("continuations", "Continuations, by where their beginning came from.", continuations, "source")
        yield _counter("extractions", "Hidden states read out, by where their sequence was.", extractions, "source")
        yield _counter("extraction_rows", "Rows that were run to read hidden states out.", rows)
        yield _counter("http_requests", "HTTP requests, by route and status.", http, "route", "status")
        yield _histogram("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token)
        yield _histogram("inter_token_latency_seconds", "Between two tokens of a request.", self.inter_token_latency)
        yield _histogram("time_per_output_token_seconds", "A request's mean of it.", self.time_per_output_token)
        yield _histogram("e2e_request_latency_seconds", "From arrival to the end.", self.e2e_request_latency)
        yield _histogram("request_queue_time_seconds", "In the engine's queue.", self.request_queue_time)
        yield _histogram("request_prefill_time_seconds", "From there to the first token.", self.request_prefill_time)
        yield _histogram("request_decode_time_seconds", "From the first token to the last.", self.request_decode_time)
        yield _histogram("request_inference_time_seconds", "Prefill and decode.", self.request_inference_time)
        yield _histogram("request_prompt_tokens", "Length of prompts.", self.request_prompt_tokens)
        yield _histogram("request_generation_tokens", "Tokens generated for a request.", self.request_generation_tokens)
        yield _histogram("extraction_seconds", "From asking for hidden states to the last.", self.extraction_time)

    def _engine_metrics(self) -> Iterator[Metric]:
        engines = {(str(index),): figures for index, figures in sorted(self.engines.items())}
        for name, text, read in ENGINE_GAUGES:
            yield _gauge(name, text, {label: read(engine.newest) for label, engine in engines.items()}, "engine")
        for name, text, _ in ENGINE_COUNTERS:
            yield _counter(name, text, {label: engine.sums[name].total for label, engine in engines.items()}, "engine")
        for name, (text, *labels) in (DRAFT_COUNTERS | EXPERT_COUNTERS).items():
            values: Values = {
                (*engine, *parts): count.total
                for engine, figures in engines.items()
                for key, count in figures.sums.items()
                for kind, *parts in [key.split("|")]
                if kind == name
            }
            yield _counter(name, text, values, "engine", *labels)
        names = self._adapter_names()
        holders: Counter[tuple[str, ...]] = Counter()
        for index, figures in sorted(self.engines.items()):
            for digest, count in figures.newest.adapters.holders.items():
                holders[str(index), names.get(digest, digest)] += count
        yield _gauge("adapter_requests", "Requests with an adapter, queued or running.", holders, "engine", "adapter")

    def _health_metrics(self) -> Iterator[Metric]:
        engines = self._health().engines
        up: Values = {(str(engine.index),): engine.state == EngineState.OK for engine in engines}
        restarts: Values = {(str(engine.index),): engine.num_restarts for engine in engines}
        bad_messages: Values = {(str(engine.index),): engine.num_bad_messages for engine in engines}
        yield _gauge("engine_up", "1 while the engine answers.", up, "engine")
        yield _gauge("engine_restarts", "Restarts of the engine's process.", restarts, "engine")
        yield _gauge("engine_bad_messages", "Invalid messages on the engine's sockets.", bad_messages, "engine")


def _counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily

    return _with_values(CounterMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), values)


def _gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    from prometheus_client.metrics_core import GaugeMetricFamily

    return _with_values(GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), values)


def _with_values(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    buckets = []
    so_far = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts):
        so_far += count
        buckets.append((floatToGoString(bound), so_far))
    return HistogramMetricFamily(f"{NAMESPACE}_{name}", text, buckets=buckets, sum_value=histogram.total)
