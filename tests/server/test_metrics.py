"""Prometheus metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.conftest import RunningServer


def scrape(server: RunningServer) -> dict[str, float]:
    with server.client() as client:
        text = client.get("/metrics").text
    return {
        f"{sample.name}{''.join(sorted(sample.labels.values()))}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


HISTOGRAMS = ("queue_time", "time_to_first_token", "time_per_output_token", "generation_latency")


def test_counters_count_prefilled_reused_and_sampled_tokens(server: RunningServer) -> None:
    before = scrape(server)
    with server.client() as client:
        body = {"prompt": "One two three. " * 60, "max_tokens": 5, "temperature": 0}
        first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
        client.post("/v1/completions", json={})
        client.post("/v1/sessions", json={"name": "counted"})
    after = scrape(server)

    def increase(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    prompt = first["usage"]["prompt_tokens"]
    assert reused > 0
    assert increase("kvkeep_prompt_tokens_prefilled_total") == 2 * prompt - reused
    assert increase("kvkeep_prompt_tokens_reused_total") == reused
    assert increase("kvkeep_generated_tokens_total") == 10
    assert increase("kvkeep_generations_totallength") == 2
    assert increase("kvkeep_http_requests_total400") == 1
    assert increase("llamacpp:tokens_predicted_total") == 10
    assert after["kvkeep_generations_running"] == 0
    assert after["kvkeep_sessionsmemory"] >= 3
    assert 0 < after["kvkeep_cell_bytes"] < after["kvkeep_cell_bytes_limit"] == 1e9


def test_latencies_are_counted_in_cumulative_buckets(server: RunningServer) -> None:
    before = scrape(server)
    with server.client() as client:
        for _ in range(3):
            client.post("/v1/completions", json={"prompt": "One two", "max_tokens": 4})
    after, seconds = scrape(server), dict[str, float]()
    for name in (f"kvkeep_{histogram}_seconds" for histogram in HISTOGRAMS):
        added = {k: v - before[k] for k, v in after.items() if k.startswith(f"{name}_bucket")}
        bounds = {float(bound.removeprefix(f"{name}_bucket")): n for bound, n in added.items()}
        counts = [bounds[bound] for bound in sorted(bounds)]
        assert counts == sorted(counts)
        assert counts[-1] == after[f"{name}_count"] - before[f"{name}_count"] == 3
        seconds[name] = after[f"{name}_sum"] - before[f"{name}_sum"]
        assert 0 < seconds[name] <= sum(bound * 3 for bound in bounds if bounds[bound] == 3)
    queue, first, token, total = seconds.values()
    assert queue < first < total
    assert total == pytest.approx(first + 4 * token)
    assert after["kvkeep_generations_waiting"] == after["llamacpp:requests_deferred"] == 0
