"""Health, the served model, and Prometheus metrics."""

from asyncio import wrap_future
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from kvkeep.engine import Totals
from kvkeep.server.errors import ApiError
from kvkeep.server.service import ContextDep

router = APIRouter()


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health() -> dict[str, str]:
    """Report that the server is up. The socket opens once the model is loaded."""
    return {"status": "ok"}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(context: ContextDep) -> dict[str, Any]:
    """List the one model that is served."""
    service, spec = context.service, context.service.model.spec
    meta = {
        "vocab_size": spec.vocab_size,
        "n_ctx_train": spec.max_positions,
        "n_embd": spec.hidden_size,
        "weights": service.model.weights,
        "path": str(service.model.path),
    }
    entry = {"id": service.name, "object": "model", "created": service.created}
    return {"object": "list", "data": [{**entry, "owned_by": "kvkeep", "meta": meta}]}


@router.get("/v1/models/{name:path}")
async def model(name: str, context: ContextDep) -> dict[str, Any]:
    """Return the model of that name."""
    entry: dict[str, Any] = (await models(context))["data"][0]
    if entry["id"] != name:
        message = f"there is no model {name!r}; there is {entry['id']!r}"
        raise ApiError(404, message, "not_found_error")
    return entry


@router.get("/metrics", response_model=None, response_class=PlainTextResponse)
async def metrics(context: ContextDep) -> Response:
    """Return Prometheus metrics, summed over all owners."""
    totals = await wrap_future(context.engine.totals())
    registry = CollectorRegistry()
    registry.register(_EngineCollector(totals, context.service.status_counts))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _EngineCollector(Collector):
    """The engine's counters; those under `llamacpp:` are the names that its clients read."""

    def __init__(self, totals: Totals, status_counts: dict[int, int]):
        self._totals, self._status_counts = totals, status_counts

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        totals, counter, gauge = self._totals, CounterMetricFamily, GaugeMetricFamily
        requests = counter("kvkeep_requests", "HTTP requests by status.", labels=["status"])
        for status, count in sorted(self._status_counts.items()):
            requests.add_metric([str(status)], count)
        ended = counter("kvkeep_answers", "Generations by how they ended.", labels=["ended"])
        for reason, count in sorted(totals.ended.items()):
            ended.add_metric([reason], count)
        yield from (requests, ended)
        yield counter(
            "kvkeep_prompt_tokens_evaluated", "Prefilled prompt tokens.", totals.prefilled
        )
        yield counter("kvkeep_prompt_tokens_reused", "Reused prompt tokens.", totals.reused)
        yield counter("kvkeep_tokens_written", "Sampled tokens.", totals.generated)
        yield counter("kvkeep_reading_seconds", "Prefill time.", totals.prefill_seconds)
        yield counter("kvkeep_writing_seconds", "Decode time.", totals.decode_seconds)
        yield gauge("kvkeep_answers_working", "Generations in progress.", totals.running)
        sessions = gauge("kvkeep_sessions", "Sessions by place.", labels=["place"])
        sessions.add_metric(["memory"], totals.in_memory)
        sessions.add_metric(["disk"], totals.on_disk)
        yield sessions
        yield gauge("kvkeep_cell_bytes", "Bytes of cells, held or reserved.", totals.nbytes)
        yield gauge("kvkeep_cell_bytes_limit", "Limit on bytes of cells.", totals.memory_limit)
        yield counter("llamacpp:prompt_tokens", "Prefilled prompt tokens.", totals.prefilled)
        yield counter("llamacpp:tokens_predicted", "Sampled tokens.", totals.generated)
        yield gauge("llamacpp:requests_processing", "Generations in progress.", totals.running)
