"""`kvkeep batch`: each prompt is answered once, as if alone, and each answer is durable."""

import fcntl
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Invoke, Start
from topics import topic_text

from kvkeep import Sampling
from kvkeep.chat.openai_chat import parse_chat
from kvkeep.cli.batch.requests import BatchRequest, read_jsonl
from kvkeep.cli.batch.results import BatchResults
from kvkeep.cli.batch.run import BatchAnswer, BatchReport
from kvkeep.engine import Finished, GeneratedToken
from kvkeep.engine.usage import Reuse, Usage
from kvkeep.model import Model
from kvkeep.server.answer_grammar import compile_answer

SYSTEM = "You answer in one word, and you never explain. " * 50
HELLO = [{"role": "user", "content": "Hello"}]
QUESTIONS = ("What is the capital of France?", "And of Italy?", "What is two and two?")


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts(count: int) -> list[dict[str, Any]]:
    text = topic_text()
    return [{"id": f"p{n}", "prompt": text[100 * n : 100 * n + 200]} for n in range(count)]


@pytest.mark.extended
def test_each_answer_equals_that_of_a_single_request(
    invoke: Invoke, smollm2: Model, tmp_path: Path
) -> None:
    """On the default model, in both formats; the common prefix is evaluated once."""
    said = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": each}]
        for each in QUESTIONS
    ]
    settings = {"max_tokens": 6, "temperature": 0}
    lines = [{"id": f"q{n}", "messages": each, **settings} for n, each in enumerate(said)]
    body = {"model": "x", "messages": said[0], **settings}
    lines.append({"custom_id": "o", "method": "POST", "url": "/v1/chat/completions", "body": body})
    lines.append({"prompt": "Once upon a time", **settings})
    out = tmp_path / "out.jsonl"
    done = invoke("batch", written(tmp_path / "in.jsonl", lines), "-o", out, "-q")
    assert done.exit_code == 0, done.stderr
    found = {each.get("id") if "text" in each else "o": each for each in results(out)}
    assert set(found) == {"q0", "q1", "q2", "o", "5"}
    usual = Sampling()  # temperature 0 alone is plain greedy decoding
    for number, messages in enumerate(said):
        session = smollm2.session(keep=4)
        session.feed(smollm2.text.chat(messages))
        assert found[f"q{number}"]["text"] == "".join(session.stream(6, usual))
    choice = found["o"]["response"]["body"]["choices"][0]
    assert choice["message"]["content"] == found["q0"]["text"]
    usages = [each["usage"] for name, each in found.items() if name.startswith("q")]
    usages.append(found["o"]["response"]["body"]["usage"])
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usages]
    assert sum(each >= 512 for each in cached) == 3


def test_a_stopped_batch_resumes(
    invoke: Invoke, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C, answered requests are not repeated, and all answers are as without it."""
    source, out, whole = written(tmp_path / "in.jsonl", prompts(6)), tmp_path / "o", tmp_path / "w"
    options = (*tiny, "-n", 5, "--at-once", 2)
    invoke("batch", source, "-o", whole, *options)
    add = BatchResults.add

    def stopped(self: BatchResults, line: dict[str, Any]) -> None:
        add(self, line)
        if len(results(out)) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(BatchResults, "add", stopped)
    broken = invoke("batch", source, "-o", out, *options)
    assert broken.exit_code == 130
    assert "2 of 6 answers" in broken.stderr
    assert "run the same command to continue" in broken.stderr
    monkeypatch.undo()
    again = invoke("batch", source, "-o", out, *options, "--report", tmp_path / "r.json")
    assert again.exit_code == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["before"], report["answered"], report["requests"]) == (2, 4, 6)
    monkeypatch.setattr(BatchResults, "add", stopped)
    broken = invoke("batch", source, "-o", out, *options, "--again")
    assert "run the same command without --again to continue" in broken.stderr
    monkeypatch.undo()
    assert invoke("batch", source, "-o", out, *options).exit_code == 0
    texts = {each["id"]: each["text"] for each in results(out)}
    assert texts == {each["id"]: each["text"] for each in results(whole)}
    assert len(results(out)) == 6


def test_interrupting_a_batch_with_a_failed_request_exits_as_interrupted(
    invoke: Invoke, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [*prompts(2), {"id": "too long", "prompt": topic_text()[:2000]}]
    source, report = written(tmp_path / "in.jsonl", lines), tmp_path / "report.json"
    count = BatchReport.count

    def interrupt_after_failure(self: BatchReport, answer: BatchAnswer) -> None:
        count(self, answer)
        if answer.error is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(BatchReport, "count", interrupt_after_failure)
    options = (*tiny, "-n", 3, "--policy", "full", "--max-kv-size", 128, "--report", report)
    interrupted = invoke("batch", source, "-o", tmp_path / "out", *options)
    assert interrupted.exit_code == 130
    assert "1 failed" in interrupted.stderr
    assert "run the same command to continue" in interrupted.stderr
    assert json.loads(report.read_text())["finish_reason"] == "interrupt"


def test_a_killed_batch_resumes_without_lost_or_repeated_answers(
    start: Start, invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    source, out = written(tmp_path / "in.jsonl", prompts(40)), tmp_path / "out"
    process = start("batch", source, "-o", out, *tiny, "-n", 40, "--at-once", 4, "-q")
    while not (out.exists() and out.read_bytes().count(b"\n") > 2):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = out.read_bytes().count(b"\n")
    with out.open("ab") as file:
        file.write(b'{"half": "a li')
    again = invoke("batch", source, "-o", out, *tiny, "-n", 40)
    assert again.exit_code == 0
    assert f"{before} of" not in again.stderr
    assert sorted(each["id"] for each in results(out)) == sorted(f"p{n}" for n in range(40))


def test_each_file_of_a_folder_is_a_request(
    invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    folder, out = tmp_path / "docs", tmp_path / "out"
    folder.mkdir()
    for name in ("b.txt", "a.md", ".hidden"):
        (folder / name).write_text(f"This is {name}.")
    asked = ("--each", folder, "--ask", "What is this?", "--system", "Be terse.")
    assert invoke("batch", *asked, "-o", out, *tiny, "-n", 3).exit_code == 0
    assert sorted(each["id"] for each in results(out)) == ["a.md", "b.txt"]
    (folder / "c").write_bytes(b"\xff\xfe")
    refused = invoke("batch", *asked, "-o", out, *tiny)
    assert refused.exit_code == 2
    assert "not UTF-8" in refused.stderr


def test_failed_requests_are_reported_and_retried(
    invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    """One of several prompts does not fit in the budget."""
    lines = [*prompts(2), {"id": "long", "prompt": topic_text()[:2000]}]
    source, out = written(tmp_path / "in.jsonl", lines), tmp_path / "out"
    options = ("-o", out, *tiny, "-n", 3, "--policy", "full")
    failed = invoke("batch", source, *options, "--max-kv-size", 128)
    assert failed.exit_code == 2
    assert "line 3" in failed.stderr
    assert "2 of 3 answers, 1 failed" in failed.stderr
    errors = {each["id"]: each.get("error") for each in results(out)}
    assert errors.pop("long")["code"] == "ContextFull"
    assert set(errors.values()) == {None}
    assert invoke("batch", source, *options, "--max-kv-size", 2048).exit_code == 0
    assert sorted(each["id"] for each in results(out)) == ["long", "p0", "p1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "object"),
        ('{"prompt": "x", "messages": []}', "needs messages or a prompt"),
        ("{}", "needs messages or a prompt"),
        ('{"prompt": 5}', "the prompt must be text"),
        ('{"prompt": "x", "n": 2}', "n is not supported in a batch"),
        ('{"prompt": "x", "functions": [{}]}', "functions is not supported"),
        ('{"messages": [], "reasoning_effort": 5}', "reasoning_effort must be text"),
        ('{"messages": [], "chat_template_kwargs": 5}', "chat_template_kwargs must be an object"),
        ('{"messages": [], "response_format": "json"}', "response_format must be an object"),
        ('{"prompt": "x", "response_format": {"type": "json_object"}}', "beside a prompt"),
        ('{"prompt": "x", "tools": []}', "tools is not supported in a batch beside a prompt"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "x", "id": 1.5}', "id must be text or a whole number"),
        ('{"prompt": "x", "id": true}', "id must be text or a whole number"),
        ('{"custom_id": ["x"], "body": {"prompt": "x"}}', "custom_id must be text"),
        ('{"prompt": "x", "stop": 5}', "stop must be text"),
        ('{"prompt": "x", "stop": {"x": 1}}', "stop must be text"),
        ('{"custom_id": "x", "url": "/v1/embeddings", "body": {}}', "url"),
        ('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "a"}', "has the same id"),
    ],
)
def test_invalid_requests_are_refused_before_the_model_loads(
    invoke: Invoke, tmp_path: Path, line: str, said: str
) -> None:
    """The model is not even looked up."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text('{"prompt": "fine"}\n' + line + "\n")
    refused = invoke("batch", source, "-o", out, "-m", "nowhere")
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert "line" in refused.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -1},
        {"messages": [{"role": 5}]},
        {"top_p": "x"},
        {"messages": [], "tools": []},
        {"prompt": ""},
        {"messages": HELLO, "response_format": {"type": "xml"}},
        {"messages": HELLO, "response_format": {"type": "json_schema"}},
        {"messages": HELLO, "response_format": {"type": 5}},
        {"messages": HELLO, "response_format": {"type": "json_object", "schema": {"type": "no"}}},
    ],
)
def test_requests_that_the_model_cannot_answer_are_refused_at_the_start(
    invoke: Invoke, tiny: list[str], tmp_path: Path, body: dict[str, Any]
) -> None:
    text = {} if "messages" in body else {"prompt": "x"}
    source, out = written(tmp_path / "in.jsonl", [{**text, **body}]), tmp_path / "out"
    refused = invoke("batch", source, "-o", out, *tiny)
    assert refused.exit_code == 2
    assert "line 1" in refused.stderr
    assert out.read_bytes() == b""


def test_a_text_may_have_characters_that_end_lines_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\n', encoding="utf-8")
    assert [request.body["prompt"] for request in read_jsonl(source)] == ["a\u2028b\x85c", "d"]


def test_a_limit_of_minus_1_is_no_limit(tmp_path: Path, smollm2: Model) -> None:
    fields = [{"max_tokens": -1}, {"max_completion_tokens": -1}, {"max_tokens": 5}]
    lines = [{"prompt": f"Hi {n}", **limit} for n, limit in enumerate(fields)]
    requests = read_jsonl(written(tmp_path / "in.jsonl", lines))
    prepared = [request.prepare(smollm2, Sampling(), 8) for request in requests]
    limits = [entry.generation_request.max_tokens for entry in prepared]
    assert limits == [smollm2.spec.max_positions, smollm2.spec.max_positions, 5]


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_disabled_reasoning_ends_at_once(
    smollm2: Model, fields: dict[str, Any], reasons: bool
) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]
    request = BatchRequest("a", "line 1", {"messages": begun, **fields}, is_chat=True)
    prepared = request.prepare(smollm2, Sampling(), 8)
    constraint = prepared.constrained_request().sampling.constraint
    assert (constraint is None) == reasons
    if constraint:
        allowed = constraint.masked(torch.zeros(smollm2.text.vocab_size)) == 0
        assert allowed.nonzero()[0].tolist() == smollm2.text.encode("</think>")[:1]


def test_a_file_of_other_answers_is_left_unchanged(
    invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    source, other = written(tmp_path / "a", prompts(1)), written(tmp_path / "b", prompts(2))
    out = tmp_path / "out"
    invoke("batch", source, "-o", out, *tiny, "-n", 2)
    kept = out.read_bytes()
    changed = written(tmp_path / "c", [{**prompts(1)[0], "max_tokens": 3, "temperature": 0}])
    refused = invoke("batch", changed, "-o", out, *tiny)
    assert refused.exit_code == 2
    assert "--again" in refused.stderr
    assert out.read_bytes() == kept
    assert (
        invoke("batch", other, "-o", out, *tiny, "-n", 2).exit_code == 0
    )  # one more request: resumes
    assert invoke("batch", changed, "-o", out, *tiny, "--again").exit_code == 0
    assert [each["usage"]["completion_tokens"] for each in results(out)] == [3]
    with out.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        locked = invoke("batch", changed, "-o", out, *tiny)
    assert locked.exit_code == 2
    assert "another process" in locked.stderr


def test_conflicting_options_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", prompts(1))
    for options in ((), (source, "--each", tmp_path, "--ask", "x"), ("--each", tmp_path)):
        assert invoke("batch", *options, "-o", tmp_path / "o").exit_code == 2
    assert invoke("batch", source).exit_code == 2
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_memory_too_small_for_any_request_is_refused_at_the_start(
    invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    source, out = written(tmp_path / "in.jsonl", prompts(1)), tmp_path / "out.jsonl"
    asked = ("batch", source, "-o", out, *tiny, "-n", 3, "--prefill-step", 16, "--memory")
    refused = invoke(*asked, "5KB")
    assert refused.exit_code == 2
    assert results(out) == []
    enough = refused.stderr.rpartition("use --memory ")[2].split()[0]
    assert invoke(*asked, enough, "--at-once", 1).exit_code == 0


def test_a_quantised_batch_warns_that_it_has_no_prefix_cache(
    invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    """Otherwise its answers would depend on the contents of the cache."""
    source, out = written(tmp_path / "in.jsonl", prompts(1)), tmp_path / "out.jsonl"
    options = ("--prefix-cache", "--kv-bits", "8", "-n", 2)
    done = invoke("batch", source, "-o", out, *tiny, *options)
    assert done.exit_code == 0
    assert "continuing without the prefix cache" in done.stderr


def test_chat_with_tools_is_answered_with_calls(smollm2: Model) -> None:
    """The prompt has what the template cannot render as text, and the answer is read."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [tool]}
    request = BatchRequest("a", "line 1", body, is_chat=True, is_openai=True)
    prepared = request.prepare(smollm2, Sampling(), 8)
    assert '"name": "weather"' in smollm2.text.decode(prepared.generation_request.prompt)
    answer = BatchAnswer(prepared)
    for text in ("Wait. <tool_", 'call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'):
        answer.append(GeneratedToken(5, text, pieces=[text]))
    answer.finished = Finished("eos", "", Usage(9, 2, Reuse(), 0.0, 0.0, 0.0))
    answer.append(answer.finished)
    (choice,) = answer.result_line("m")["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "Wait."
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    answer.prepared = replace(prepared, request=replace(request, is_openai=False))
    line = answer.result_line("m")
    assert line["text"].strip() == "Wait."
    assert line["tool_calls"] == [call]
    cut = BatchAnswer(prepared)
    for text in ("<tool_call>", '{"name": "weather", "arguments": {"a": '):
        cut.append(GeneratedToken(5, text, pieces=[text]))
    cut.finished = answer.finished
    cut.append(cut.finished)
    (choice,) = cut.result_line("m")["response"]["body"]["choices"]
    assert choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("strict", [False, True])
def test_calls_of_strict_tools_are_held_as_in_the_server(smollm2: Model, strict: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    function = {"name": "choose", "parameters": schema, "strict": strict}
    body = {"messages": HELLO, "tools": [{"type": "function", "function": function}]}
    request = BatchRequest("a", "line 1", body, is_chat=True, is_openai=True)
    generation = request.prepare(smollm2, Sampling(), 8).constrained_request()
    chat = parse_chat(body)
    answer = compile_answer(smollm2, chat)
    of_server = answer.constraint(smollm2, smollm2.renderer.render(chat))
    of_batch = generation.sampling.constraint
    if not strict:
        assert of_batch is of_server is None
        return
    assert of_batch is not None
    assert of_server is not None
    logits, counts = torch.zeros(smollm2.text.vocab_size), []
    for token in smollm2.text.encode('<tool_call>\n{"name": "choose", "arguments": {"a": "no"}}'):
        masked = of_batch.masked(logits)
        assert torch.equal(masked, of_server.masked(logits))
        counts.append(int((masked == 0.0).sum()))
        of_batch.accept(token)
        of_server.accept(token)
    assert min(counts) < 10
    assert counts[0] == len(logits)


def test_answers_follow_their_schemas_and_required_calls(invoke: Invoke, tmp_path: Path) -> None:
    """Also several answers at once by one schema; `null` and a format of text change nothing."""
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    by_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "choose", "parameters": schema}}
    bodies = [
        {"response_format": by_schema},
        {"response_format": by_schema, "messages": [{"role": "user", "content": "Bye"}]},
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": {"type": "text"}, "n": None, "logprobs": None, "max_tokens": 2},
    ]
    lines = [{"messages": HELLO, "max_tokens": 60, **body} for body in bodies]
    out = tmp_path / "out.jsonl"
    done = invoke("batch", written(tmp_path / "in.jsonl", lines), "-o", out)
    assert done.exit_code == 0, done.stderr
    answers = {entry["id"]: entry for entry in results(out)}
    for name in ("1", "2"):
        assert json.loads(answers[name]["text"])["a"] in ("yes", "no")
        assert "tool_calls" not in answers[name]
    (call,) = answers["3"]["tool_calls"]
    assert call["function"]["name"] == "choose"
    assert json.loads(call["function"]["arguments"])["a"] in ("yes", "no")
    assert answers["4"]["finish_reason"] == "length"


def test_parts_of_requests_that_the_model_cannot_get_are_named(
    invoke: Invoke, tmp_path: Path
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, image]}]
    body = {"messages": messages, "tools": [{"type": "web_search"}], "max_tokens": 1}
    source = written(tmp_path / "in.jsonl", [body, body])
    done = invoke("batch", source, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "line 1 (and 1 other request): messages: placeholders stand for" in done.stderr
    assert "line 1 (and 1 other request): tools.web_search is ignored" in done.stderr
    assert "placeholders" not in invoke("batch", source, "-o", tmp_path / "out2", "-q").stderr
