"""Prometheus metrics."""

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
    assert increase("kvkeep_prompt_tokens_evaluated_total") == 2 * prompt - reused
    assert increase("kvkeep_prompt_tokens_reused_total") == reused
    assert increase("kvkeep_tokens_written_total") == 10
    assert increase("kvkeep_answers_totallength") == 2
    assert increase("kvkeep_requests_total400") == 1
    assert increase("llamacpp:tokens_predicted_total") == 10
    assert after["kvkeep_answers_working"] == 0
    assert after["kvkeep_sessionsmemory"] >= 3
    assert 0 < after["kvkeep_cell_bytes"] < after["kvkeep_cell_bytes_limit"] == 1e9
