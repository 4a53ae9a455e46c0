"""Stored responses that are retrieved as a stream."""

import openai
import pytest
from server.test_response_items import DELTA_FIELDS

from tests.server.conftest import ScriptedServer

CALL = '<tool_call>\n{"name": "NAME", "arguments": {"input": "ls"}}\n</tool_call>'
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "c"},
    {"type": "local_shell"},
]
ANSWER = "<think>\nHm.\n</think>\n\nLet me look.\n" + "\n".join(
    CALL.replace("NAME", name) for name in ("f", "c", "local_shell")
)


@pytest.mark.parametrize("summary", [None, "auto"])
def test_the_events_of_a_stored_response_are_replayed(
    scripted: ScriptedServer, summary: str | None
) -> None:
    scripted.write(ANSWER)
    sdk = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    fields = {"input": "Hi", "tools": TOOLS, "reasoning": {"summary": summary}}
    fields["include"] = ["message.output_text.logprobs"]
    first = [event.to_dict() for event in sdk.responses.create(**fields, stream=True)]
    response_id = first[-1]["response"]["id"]
    again = [event.to_dict() for event in sdk.responses.retrieve(response_id, stream=True)]
    again_numbered = [dict(event) for event in again]
    whole = [event for event in first if event["type"] not in DELTA_FIELDS]
    replayed = [event for event in again if event["type"] not in DELTA_FIELDS]
    for event in (*whole, *replayed):
        event.pop("sequence_number")
    for event in (whole[-1], replayed[-1]):
        event.pop("timings", None)
    assert [event["type"] for event in replayed] == [event["type"] for event in whole]
    for left, right in zip(replayed, whole, strict=True):
        assert left == right
    deltas = [event["delta"] for event in again if event["type"] in DELTA_FIELDS]
    joined = "".join(event["delta"] for event in first if event["type"] in DELTA_FIELDS)
    assert "".join(deltas) == joined
    assert [
        event.sequence_number for event in sdk.responses.retrieve(response_id, stream=True)
    ] == [*range(len(again))]
    rest = sdk.responses.retrieve(response_id, stream=True, starting_after=len(again) - 3)
    numbers = [event["sequence_number"] for event in again_numbered]
    assert numbers == [*range(len(again))]
    rest = sdk.responses.retrieve(response_id, stream=True, starting_after=len(again) - 3)
    assert [event.sequence_number for event in rest] == [len(again) - 2, len(again) - 1]
    assert (
        sdk.responses.retrieve(response_id).to_dict()["output"] == first[-1]["response"]["output"]
    )
