"""Sessions of five coding agents, in the shapes in which the real programs send their prompts.

Each agent is a generator: it yields a request, gets the server's answer, and goes on as the program
does. The shapes are written by hand, from what is known of the programs' prompts; they are no
recordings, and all texts are generated.

| Agent | API | What it changes in its prompts |
|---|---|---|
| Codex | Responses, `store: false` | keys of tools in another order after a restart |
| Claude Code | Anthropic messages | billing header of each request; reminders that go; thinking |
| opencode | OpenAI chat | the date in the system text; results of old calls that are cleared |
| Qwen Code | OpenAI chat | calls as canonical JSON; a server's tools that come later |
| aider | OpenAI chat, no tools | files behind the history, which move; a summarised history |
"""

import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.agent_texts import (
    Prose,
    Sizes,
    canonical,
    functions,
    late_functions,
    reordered,
    written_turns,
)

# What an agent changes in the part of the prompt that was there before. "": nothing, or only what a
# server with default rules does not notice.
Change = Literal["", "header", "reminder", "thinking", "tools", "cleared", "files", "summary"]
_MAX_TOKENS = 200


@dataclass(frozen=True)
class AgentRequest:
    """A request. writes: what the model answers. change: of the prompt; see `Change`."""

    path: str
    body: Mapping[str, Any]
    writes: str
    change: Change = ""


Agent = Generator[AgentRequest, dict[str, Any], None]


@dataclass
class _Texts:
    """The texts of one session."""

    sizes: Sizes
    prose: Prose = field(default_factory=Prose)

    def __post_init__(self) -> None:
        self.instructions = self.prose.take(self.sizes.instructions)
        self.project = self.prose.take(self.sizes.project)
        self.functions = functions(self.prose, self.sizes)
        self.late_functions = late_functions(self.prose, self.sizes)
        self.written = written_turns(self.prose, self.sizes)
        self.middle = self.sizes.turns // 2 + 1  # the turn in which something rare happens


def codex(sizes: Sizes) -> Agent:
    """Yield requests of the Responses API, which the agent stores itself."""
    texts = _Texts(sizes)
    tools = [{"type": "function", "strict": False, **tool} for tool in texts.functions]
    environment = "<environment_context>\n<cwd>/project</cwd>\n<shell>bash</shell>\n"
    environment += "<current_date>2026-08-14</current_date>\n</environment_context>"
    items: list[dict[str, Any]] = [
        _item("developer", f"<permissions>\nYou may write in /project.\n{texts.project}"),
        _item("user", environment),
        _item("user", "Compare the parts of the manual in docs."),
    ]
    for turn in range(1, sizes.turns + 1):
        written = next(texts.written)
        if turn == texts.middle:
            tools = reordered(tools)
            items.append(_item("user", "Go on where you were. Also look for repetitions."))
        body = {
            "instructions": texts.instructions,
            "input": items,
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198-session",
        }
        answer = yield AgentRequest("/v1/responses", body, written.text(thinks=True))
        for item in answer["output"]:
            items.append({name: value for name, value in item.items() if name != "status"})
            if item["type"] == "function_call":
                output = {"type": "function_call_output", "call_id": item["call_id"]}
                items.append({**output, "output": f"Exit code: 0\nOutput:\n{written.content}"})


def _item(role: str, text: str) -> dict[str, Any]:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "role": role, "content": [part]}


def claude_code(sizes: Sizes) -> Agent:
    """Yield requests of Anthropic's API: a billing header, reminders, and thinking that is dropped.

    A reminder is behind the newest tool result, and gone from the next request on.
    """
    texts = _Texts(sizes)
    tools = [_anthropic_tool(tool) for tool in texts.functions]
    intro = "<system-reminder>\nInstructions of the project:\n" + texts.project
    first = [
        _text(f"{intro}\nToday's date is 2026-08-14.\n</system-reminder>\n"),
        _text("Compare the parts of the manual in docs."),
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    reminder = "<system-reminder>\nThe list of tasks is empty. Do not tell the user.\n"
    reminded = False
    for turn in range(1, sizes.turns + 1):
        written = next(texts.written)
        change: Change = ""
        if reminded:
            messages[-3]["content"].pop()
            change = "reminder"
        if turn == texts.middle:  # a new question: thinking before it is dropped, in all turns
            for message in messages:
                message["content"] = [b for b in message["content"] if b["type"] != "thinking"]
            messages[-1]["content"].append(_text("Also look for repetitions."))
            change = "thinking"
        reminded = turn % 2 == 0
        if reminded:
            messages[-1]["content"].append(_text(f"{reminder}</system-reminder>\n"))
        code = hashlib.sha256(str(turn).encode()).hexdigest()[:5]
        header = f"x-anthropic-billing-header: cc_version=2.1.332.{code[:3]}; cch={code};"
        body = {
            "system": [_text(header), _marked(_text(texts.instructions))],
            "messages": [*messages[:-1], _with_mark(messages[-1])],
            "tools": tools,
            "max_tokens": _MAX_TOKENS,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        answer = yield AgentRequest("/v1/messages", body, written.text(thinks=True), change)
        messages.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": written.content}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"name": tool["name"], "description": tool["description"]}
    return {**fields, "input_schema": tool["parameters"]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _marked(block: Mapping[str, Any]) -> dict[str, Any]:
    return {**block, "cache_control": {"type": "ephemeral"}}


def _with_mark(message: Mapping[str, Any]) -> dict[str, Any]:
    *blocks, last = message["content"]
    return {**message, "content": [*blocks, _marked(last)]}


def opencode(sizes: Sizes) -> Agent:
    """Yield requests of OpenAI's chat API: midnight passes, and old results are cleared."""
    texts = _Texts(sizes)
    tools = [{"type": "function", "function": tool} for tool in texts.functions]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Compare the parts of the manual in docs."},
    ]
    for turn in range(1, sizes.turns + 1):
        written, day = next(texts.written), "Fri Aug 14 2026"
        change: Change = "header" if turn == texts.middle else ""
        if turn >= texts.middle:
            day = "Sat Aug 15 2026"
        if turn == sizes.turns:
            next(m for m in messages if m["role"] == "tool")["content"] = "[result cleared]"
            change = "cleared"
        environment = f"<env>\n  Working directory: /project\n  Today's date: {day}\n</env>\n"
        messages[0]["content"] = f"You are an agent.\n{environment}{texts.instructions}"
        body = {"messages": messages, "tools": tools, "max_tokens": _MAX_TOKENS}
        answer = yield AgentRequest(
            "/v1/chat/completions", body, written.text(thinks=False), change
        )
        message = answer["choices"][0]["message"]
        messages.append({**message, "content": (message["content"] or "").strip()})
        messages += _tool_messages(message, written.content)


def qwen_code(sizes: Sizes) -> Agent:
    """Yield requests of OpenAI's chat API: canonical JSON, and tools that come in the middle."""
    texts = _Texts(sizes)
    listed = list(texts.functions)
    context = f"The context of our session.\nToday's date is 2026-08-14.\n{texts.project}"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": texts.instructions},
        {"role": "user", "content": context},
        {"role": "assistant", "content": "Understood. Thanks for the context."},
        {"role": "user", "content": "Compare the parts of the manual in docs."},
    ]
    for turn in range(1, sizes.turns + 1):
        written = next(texts.written)
        change: Change = ""
        if turn == texts.middle:
            listed[5:5], change = texts.late_functions, "tools"
        tools = [{"type": "function", "function": tool} for tool in listed]
        body = {"messages": messages, "tools": tools, "max_tokens": _MAX_TOKENS}
        answer = yield AgentRequest("/v1/chat/completions", body, written.text(thinks=True), change)
        message = answer["choices"][0]["message"]
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = canonical(call["function"]["arguments"])
        kept = {name: value for name, value in message.items() if name != "reasoning_content"}
        messages.append(kept)
        messages += _tool_messages(message, written.content)


def _tool_messages(message: Mapping[str, Any], content: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call in message.get("tool_calls") or ()
    ]


def aider(sizes: Sizes) -> Agent:
    """Yield requests without tools: the history, then the files of the chat, then the question.

    So each answer that joins the history moves the files, which the model may have edited.
    """
    texts = _Texts(sizes)
    repository = texts.prose.take(sizes.project) + "\n" + texts.prose.take(2 * sizes.file)
    files = [texts.prose.take(sizes.file) for _ in range(3)]
    done: list[dict[str, Any]] = []
    for turn in range(1, sizes.turns + 1):
        change: Change = "files" if turn > 1 else ""
        if turn == texts.middle:
            summary = "I asked you for changes of the first parts, and you made them."
            done, change = [_said("user", summary), _said("assistant", "Ok.")], "summary"
        question = _said("user", f"Shorten the sentence {turn} of file {turn % 3 + 1}.")
        listing = "".join(f"\nfile_{n}.txt\n```\n{text}\n```\n" for n, text in enumerate(files, 1))
        messages = [
            _said("system", texts.instructions),
            _said("user", f"A map of the repository:\n{repository}"),
            _said("assistant", "Ok, I will not edit these files."),
            *done,
            _said("user", f"These files are in the chat, with their contents:\n{listing}"),
            _said("assistant", "Ok, any changes I propose will be to those files."),
            question,
            _said("system", f"Answer with edit blocks.\n{texts.project}"),
        ]
        edited = turn % 3
        old, new = f"{files[edited][:60]}", f"Change {turn}: {files[edited][:40]}"
        edit = f"<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE"
        writes = f"file_{edited + 1}.txt\n```\n{edit}\n```"
        body = {"messages": messages, "max_tokens": _MAX_TOKENS}
        answer = yield AgentRequest("/v1/chat/completions", body, writes, change)
        files[edited] = files[edited].replace(old, new, 1)
        done += [question, _said("assistant", answer["choices"][0]["message"]["content"])]


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


AGENTS: Mapping[str, Callable[[Sizes], Agent]] = {
    "Codex": codex,
    "Claude Code": claude_code,
    "opencode": opencode,
    "Qwen Code": qwen_code,
    "aider": aider,
}
