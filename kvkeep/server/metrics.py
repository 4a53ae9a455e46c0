"""Metrics for Prometheus, summed over all owners."""

import math
from asyncio import wrap_future
from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from kvkeep.engine import Totals
from kvkeep.engine.latency import Histogram
from kvkeep.server.service import ContextDep

router = APIRouter()


@router.get("/metrics", response_model=None, response_class=PlainTextResponse)
async def metrics(context: ContextDep) -> Response:
    """Return Prometheus metrics, summed over all owners."""
    totals = await wrap_future(context.engine.totals())
    collector = _EngineCollector(totals, context.service.status_counts)
    return Response(generate_latest(collector), media_type=CONTENT_TYPE_LATEST)


class _EngineCollector(Collector):
    """Metrics of the engine; names that begin with `llamacpp:` are for llama.cpp's clients."""

    def __init__(self, totals: Totals, status_counts: dict[int, int]):
        self._totals, self._status_counts = totals, status_counts

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._tokens()
        yield from self._latencies()
        yield from self._memory()
        yield from self._as_llama_cpp()

    def _requests(self) -> Iterator[Metric]:
        totals, counter, gauge = self._totals, CounterMetricFamily, GaugeMetricFamily
        requests = counter("kvkeep_http_requests", "HTTP requests by status.", labels=["status"])
        for status, count in sorted(self._status_counts.items()):
            requests.add_metric([str(status)], count)
        ended = counter(
            "kvkeep_generations", "Ended generations by finish reason.", labels=["reason"]
        )
        for reason, count in sorted(totals.ended.items()):
            ended.add_metric([reason], count)
        yield from (requests, ended)
        yield gauge("kvkeep_generations_running", "Generations in progress.", totals.running)
        yield gauge("kvkeep_generations_waiting", "Of these, before their prefill.", totals.waiting)

    def _tokens(self) -> Iterator[Metric]:
        totals, counter = self._totals, CounterMetricFamily
        yield counter("kvkeep_prompt_tokens_prefilled", "Prefilled tokens.", totals.prefilled)
        yield counter(
            "kvkeep_prompt_tokens_reused", "Prompt tokens found in a cache.", totals.reused
        )
        yield counter("kvkeep_generated_tokens", "Sampled tokens.", totals.generated)
        yield counter("kvkeep_draft_tokens", "Tokens of drafts that were tried.", totals.drafted)
        yield counter("kvkeep_draft_tokens_accepted", "Those that were sampled.", totals.accepted)

    def _latencies(self) -> Iterator[Metric]:
        totals, latencies, counter = self._totals, self._totals.latencies, CounterMetricFamily
        yield counter("kvkeep_prefill_seconds", "Prefill time.", totals.prefill_seconds)
        yield counter("kvkeep_decode_seconds", "Decode time.", totals.decode_seconds)
        yield _histogram(
            "kvkeep_queue_time_seconds", "From submission to the prefill.", latencies.queue
        )
        yield _histogram(
            "kvkeep_time_to_first_token_seconds",
            "From submission to the end of the prefill.",
            latencies.first_token,
        )
        yield _histogram(
            "kvkeep_time_per_output_token_seconds", "Decode time a token.", latencies.per_token
        )
        yield _histogram(
            "kvkeep_generation_latency_seconds", "From submission to the end.", latencies.total
        )

    def _memory(self) -> Iterator[Metric]:
        totals, counter, gauge = self._totals, CounterMetricFamily, GaugeMetricFamily
        sessions = gauge("kvkeep_sessions", "Sessions by location.", labels=["place"])
        sessions.add_metric(["memory"], totals.in_memory)
        sessions.add_metric(["disk"], totals.on_disk)
        yield sessions
        yield gauge("kvkeep_cell_bytes", "Bytes of cells, used or reserved.", totals.nbytes)
        yield gauge("kvkeep_cell_bytes_limit", "Limit on bytes of cells.", totals.memory_limit)
        yield gauge("kvkeep_prefix_pins", "Pinned prefixes.", totals.pins)
        yield counter(
            "kvkeep_prefix_pins_evicted", "Pins lost to the memory limit.", totals.evicted_pins
        )

    def _as_llama_cpp(self) -> Iterator[Metric]:
        totals, counter, gauge = self._totals, CounterMetricFamily, GaugeMetricFamily
        yield counter("llamacpp:prompt_tokens", "Prefilled prompt tokens.", totals.prefilled)
        yield counter("llamacpp:prompt_seconds", "Prefill time.", totals.prefill_seconds)
        yield counter("llamacpp:tokens_predicted", "Sampled tokens.", totals.generated)
        yield counter("llamacpp:tokens_predicted_seconds", "Decode time.", totals.decode_seconds)
        working = totals.running - totals.waiting
        yield gauge("llamacpp:requests_processing", "Generations at work.", working)
        yield gauge("llamacpp:requests_deferred", "Generations that wait.", totals.waiting)


def _histogram(name: str, documentation: str, histogram: Histogram) -> Metric:
    buckets = [
        ("+Inf" if math.isinf(bound) else str(bound), count)
        for bound, count in histogram.cumulative()
    ]
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=histogram.sum)
