"""`/metrics`: what the server has done and holds, for Prometheus."""

import asyncio
from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from kvkeep.engine import Totals
from kvkeep.server.schemas import Serving

router = APIRouter()
_Metric = CounterMetricFamily | GaugeMetricFamily


@router.get("/metrics", response_model=None, response_class=PlainTextResponse)
async def metrics(service: Serving) -> Response:
    """Of all owners together."""
    totals = await asyncio.wrap_future(service.engine.totals())
    registry = CollectorRegistry()
    registry.register(_Told(totals, service.statuses))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Told(Collector):
    """Numbers that the engine has counted; the ones under `llamacpp:` are what its clients read."""

    def __init__(self, totals: Totals, statuses: dict[int, int]):
        self._totals, self._statuses = totals, statuses

    def collect(self) -> Iterator[_Metric]:
        totals = self._totals
        requests = CounterMetricFamily("kvkeep_requests", "By status.", labels=["status"])
        for status, count in sorted(self._statuses.items()):
            requests.add_metric([str(status)], count)
        answers = CounterMetricFamily("kvkeep_answers", "By how they ended.", labels=["ended"])
        for ended, count in sorted(totals.ended.items()):
            answers.add_metric([ended], count)
        yield from (requests, answers)
        yield _counter("kvkeep_prompt_tokens_evaluated", "Of prompts.", totals.prefilled)
        yield _counter("kvkeep_prompt_tokens_reused", "Not evaluated again.", totals.reused)
        yield _counter("kvkeep_tokens_written", "By the model.", totals.generated)
        yield _counter("kvkeep_reading_seconds", "Of all answers.", totals.prefill_seconds)
        yield _counter("kvkeep_writing_seconds", "Of all answers.", totals.decode_seconds)
        yield GaugeMetricFamily("kvkeep_answers_working", "Now.", totals.running)
        sessions = GaugeMetricFamily("kvkeep_sessions", "By where they are.", labels=["place"])
        sessions.add_metric(["memory"], totals.in_memory)
        sessions.add_metric(["disk"], totals.on_disk)
        yield sessions
        yield GaugeMetricFamily("kvkeep_cell_bytes", "Held or reserved.", totals.nbytes)
        yield GaugeMetricFamily(
            "kvkeep_cell_bytes_limit", "That there may be.", totals.memory_limit
        )
        yield _counter("llamacpp:prompt_tokens", "Of prompts.", totals.prefilled)
        yield _counter("llamacpp:tokens_predicted", "By the model.", totals.generated)
        yield GaugeMetricFamily("llamacpp:requests_processing", "Now.", totals.running)


def _counter(name: str, what: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, what, value)
