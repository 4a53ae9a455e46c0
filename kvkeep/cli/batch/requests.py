"""The requests of a batch: lines of a JSONL file, or the files of a folder."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import read_text_file

if TYPE_CHECKING:
    from kvkeep import Model, Sampling
    from kvkeep.chat.output_reader import OutputReader
    from kvkeep.engine import GenerationRequest
    from kvkeep.session.sampling import Constraint

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")
_CHAT_FIELDS = ("messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")
_OTHER_FIELDS = (*_CHAT_FIELDS, "prompt", "stop", "model", "user", "id", "metadata")
_SUPPORTED_FIELDS = {*_SAMPLING_FIELDS, *_MAX_TOKENS_FIELDS, *_OTHER_FIELDS}
# Fields accepted only with their default value.
_DEFAULT_ONLY_FIELDS = {"n": 1, "stream": False, "logprobs": False, "echo": False}


@dataclass(frozen=True)
class BatchRequest:
    """One prompt with its parameters.

    id: the given one, or else the line number. location: file and line, for error messages. body:
    the fields of an OpenAI request. is_chat: whether the prompt is a list of messages. is_openai:
    whether the request, and so its result, has the format of an OpenAI batch.
    """

    id: str
    location: str
    body: Mapping[str, Any]
    is_chat: bool
    is_openai: bool = False

    @cached_property
    def digest(self) -> str:
        """A hash of id and body. A resumed batch finds earlier results by it."""
        text = json.dumps([self.id, self.body], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def prepare(
        self, model: "Model", default_sampling: "Sampling", default_max_tokens: int
    ) -> "PreparedRequest":
        """Return the request with its prompt. The defaults are for fields that the body lacks."""
        from kvkeep.engine import GenerationRequest

        body = self.body
        try:
            sampling, reader = self._sampling_parameters(default_sampling), None
            if self.is_chat:
                ids, reader, constraint = self._chat_prompt(model)
                sampling = replace(sampling, constraint=constraint)
            else:
                ids = model.text.encode(body["prompt"])
            if not ids:
                raise InvalidArgument("the prompt is empty")
            limit = next(filter(None, map(body.get, _MAX_TOKENS_FIELDS)), default_max_tokens)
            limit = model.spec.max_positions if limit < 0 else limit  # -1: no limit
            return PreparedRequest(self, GenerationRequest(tuple(ids), limit, sampling), reader)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.location}: {error}") from error

    def _chat_prompt(self, model: "Model") -> "tuple[list[int], OutputReader, Constraint | None]":
        """Return the prompt of the messages, and a reader and a constraint for the answer."""
        from kvkeep.chat.openai_chat import parse_chat
        from kvkeep.chat.output_reader import OutputReader
        from kvkeep.chat.renderer import RenderOptions
        from kvkeep.server.reasoning_budget import reasoning_constraint

        chat, renderer = parse_chat(self.body), model.renderer
        if chat.choice.mode == "required":
            raise InvalidArgument("tool_choice must be auto or none in a batch")
        effort = self.body.get("reasoning_effort")
        variables = self.body.get("chat_template_kwargs") or {}
        options = RenderOptions(reasoning_effort=effort, template_kwargs=variables)
        prompt = renderer.render(chat, options)
        reader = OutputReader(
            renderer.output_format,
            chat.callable_tools,
            renderer.new_call_id,
            prompt.starts_in_reasoning,
            control_text=model.text.control_text,
        )
        reasons = effort != "none" and variables.get("enable_thinking") is not False
        constraint = reasoning_constraint(
            model.text,
            renderer.output_format,
            prompt.starts_in_reasoning,
            None if reasons else 0,
            None,
            model.end_token_ids,
        )
        return prompt.ids, reader, constraint

    def _sampling_parameters(self, default: "Sampling") -> "Sampling":
        from kvkeep.session.default_sampling import with_parameters

        given = ((name, self.body.get(name)) for name in _SAMPLING_FIELDS)
        fields = {name: value for name, value in given if value is not None}
        stop = self.body.get("stop")
        if stop is not None:
            fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        # Each request has its own seed, which is the same when the batch is resumed.
        if "seed" not in fields and default.seed is not None:
            fields["seed"] = (default.seed + int(self.digest[:8], 16)) % 2**32
        return with_parameters(default, fields)


@dataclass(frozen=True)
class PreparedRequest:
    """A request with its prompt. reader: reads the answer of a chat, None for another prompt."""

    request: BatchRequest
    generation_request: "GenerationRequest"
    reader: "OutputReader | None"


def read_jsonl(path: Path) -> list[BatchRequest]:
    """Read a request from each line that is not empty. Raises InvalidArgument, naming the line."""
    requests = [
        _parse_line(line, line_number, f"{path}, line {line_number}")
        for line_number, line in enumerate(read_text_file(path).splitlines(), 1)
        if line.strip()
    ]
    _check_requests(requests, path)
    return requests


def read_folder(folder: Path, question: str, system: str | None) -> list[BatchRequest]:
    """Make a chat request from each file: its text, followed by the question."""
    requests: list[BatchRequest] = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            system_messages = [] if system is None else [{"role": "system", "content": system}]
            text = f"{read_text_file(path).strip()}\n\n{question}"
            body = {"messages": [*system_messages, {"role": "user", "content": text}]}
            requests.append(BatchRequest(path.name, str(path), body, is_chat=True))
    _check_requests(requests, folder)
    return requests


def _check_requests(requests: list[BatchRequest], source: Path) -> None:
    """Raise InvalidArgument if there are no requests, or if two have the same id."""
    if not requests:
        raise InvalidArgument(f"{source} contains no requests")
    locations: dict[str, str] = {}
    for request in requests:
        if other := locations.get(request.id):
            raise InvalidArgument(f"{request.location} has the same id as {other}: {request.id!r}")
        locations[request.id] = request.location


def _parse_line(line: str, line_number: int, location: str) -> BatchRequest:
    """Parse a line of the input file. location: the line, for error messages."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{location}: not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{location}: a request must be a JSON object")
    is_openai = "body" in entry
    body = entry["body"] if is_openai else entry
    request_id = str(entry.get("custom_id" if is_openai else "id") or line_number)
    if not isinstance(body, dict):
        raise InvalidArgument(f"{location}: the body must be a JSON object")
    url = entry.get("url", _CHAT) if is_openai else ""
    if is_openai and url not in (_CHAT, _COMPLETION):
        raise InvalidArgument(f"{location}: url must be {_CHAT} or {_COMPLETION}; found {url!r}")
    is_chat = "messages" in body
    _check_body(body, location, is_chat)
    return BatchRequest(request_id, location, body, is_chat, is_openai)


def _check_body(body: Mapping[str, Any], location: str, is_chat: bool) -> None:
    """Raise InvalidArgument for fields that are missing, unsupported or of the wrong type."""
    if is_chat == ("prompt" in body):
        raise InvalidArgument(f"{location}: needs messages or a prompt")
    if not is_chat and not isinstance(body["prompt"], str):
        raise InvalidArgument(f"{location}: the prompt must be text")
    for name, value in body.items():
        if name not in _SUPPORTED_FIELDS and (
            name not in _DEFAULT_ONLY_FIELDS
            or (value or _DEFAULT_ONLY_FIELDS[name]) != _DEFAULT_ONLY_FIELDS[name]
        ):
            raise InvalidArgument(f"{location}: {name} is not supported in a batch; leave it out")
    if not isinstance(body.get("reasoning_effort"), str | None):
        raise InvalidArgument(f"{location}: reasoning_effort must be text")
    if not isinstance(body.get("chat_template_kwargs"), dict | None):
        raise InvalidArgument(f"{location}: chat_template_kwargs must be an object")
    for name in _MAX_TOKENS_FIELDS:
        limit = body.get(name)
        if limit is not None and (not isinstance(limit, int) or limit < -1 or not limit):
            raise InvalidArgument(
                f"{location}: {name} must be a number of tokens, or -1 for no limit; "
                f"found {limit!r}"
            )
    stops = [] if body.get("stop") is None else body["stop"]  # text is an iterable of texts, too
    if not isinstance(stops, Iterable) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidArgument(f"{location}: stop must be text, or a list of texts")
