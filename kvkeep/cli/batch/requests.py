"""The requests of a batch: lines of a JSONL file, or the files of a folder."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.cli.options import STDIN, read_text
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import read_text_file

if TYPE_CHECKING:
    from kvkeep import Model, Sampling
    from kvkeep.cli.batch.chat_prompt import ChatPrompt
    from kvkeep.engine import GenerationRequest

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")
_OTHER_FIELDS = ("stop", "model", "user", "id", "metadata")
_COMMON_FIELDS = {*_SAMPLING_FIELDS, *_MAX_TOKENS_FIELDS, *_OTHER_FIELDS}
_PROMPT_FIELDS = {*_COMMON_FIELDS, "prompt"}
_CHAT_FIELDS = {
    *_COMMON_FIELDS,
    *("messages", "tools", "tool_choice", "response_format"),
    *("reasoning_effort", "chat_template_kwargs"),
}
# Fields accepted only with their default value.
_DEFAULT_ONLY_FIELDS = {"n": 1, "stream": False, "logprobs": False, "echo": False}


@dataclass(frozen=True)
class BatchRequest:
    """One prompt with its parameters.

    id: the given one, or else the line number as text. location: file and line, for error
    messages. body:
    the fields of an OpenAI request. is_chat: whether the prompt is a list of messages. is_openai:
    whether the request, and so its result, has the format of an OpenAI batch.
    """

    id: str | int
    location: str
    body: Mapping[str, Any]
    is_chat: bool
    is_openai: bool = False

    @cached_property
    def digest(self) -> str:
        """A hash of id and body. A resumed batch finds earlier results by it."""
        text = json.dumps([str(self.id), self.body], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def prepare(
        self, model: "Model", default_sampling: "Sampling", default_max_tokens: int
    ) -> "PreparedRequest":
        """Return the request with its prompt. The defaults are for fields that the body lacks."""
        from kvkeep.cli.batch.chat_prompt import render_chat
        from kvkeep.engine import GenerationRequest

        body = self.body
        try:
            chat = render_chat(model, body) if self.is_chat else None
            ids = model.text.encode(body["prompt"]) if chat is None else chat.prompt.ids
            if not ids:
                raise InvalidArgument("the prompt is empty")
            limit = next(filter(None, map(body.get, _MAX_TOKENS_FIELDS)), default_max_tokens)
            limit = model.spec.max_positions if limit < 0 else limit  # -1: no limit
            sampling = self._sampling_parameters(default_sampling)
            if chat is not None:
                sampling = replace(sampling, reasoning=chat.reasoning_markers)
            return PreparedRequest(self, GenerationRequest(tuple(ids), limit, sampling), chat)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.location}: {error}") from error

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
    """A request with its prompt. chat: None for a prompt without messages."""

    request: BatchRequest
    generation_request: "GenerationRequest"
    chat: "ChatPrompt | None" = None

    def constrained_request(self) -> "GenerationRequest":
        """Return the request of one generation, with a constraint of its own if it needs one."""
        constraint = self.chat.new_constraint() if self.chat else None
        request = self.generation_request
        if constraint is None:
            return request
        return replace(request, sampling=replace(request.sampling, constraint=constraint))


def read_jsonl(path: Path) -> list[BatchRequest]:
    """Read a request from each line that is not empty; path "-" is standard input.

    Raises InvalidArgument, naming the line.
    """
    source = "standard input" if str(path) == STDIN else str(path)
    requests = [
        _parse_line(line, line_number, f"{source}, line {line_number}")
        for line_number, line in enumerate(read_text(str(path)).split("\n"), 1)
        if line.strip()
    ]
    _check_requests(requests, source)
    return requests


def read_folder(
    folder: Path, question: str, system: str | None, leave_out: Iterable[Path] = ()
) -> list[BatchRequest]:
    """Make a chat request from each file but those of `leave_out`: its text, then the question."""
    requests: list[BatchRequest] = []
    excluded = {path.resolve() for path in leave_out}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.resolve() in excluded:
            continue
        if path.is_file():
            system_messages = [] if system is None else [{"role": "system", "content": system}]
            text = f"{read_text_file(path).strip()}\n\n{question}"
            body = {"messages": [*system_messages, {"role": "user", "content": text}]}
            requests.append(BatchRequest(path.name, str(path), body, is_chat=True))
    _check_requests(requests, str(folder))
    return requests


def _check_requests(requests: list[BatchRequest], source: str) -> None:
    """Raise InvalidArgument if there are no requests, or if two have the same id."""
    if not requests:
        raise InvalidArgument(f"{source} contains no requests")
    locations: dict[str, str] = {}
    for request in requests:
        if other := locations.get(str(request.id)):
            raise InvalidArgument(f"{request.location} has the same id as {other}: {request.id!r}")
        locations[str(request.id)] = request.location


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
    id_field = "custom_id" if is_openai else "id"
    request_id = entry.get(id_field)
    if request_id is None:
        request_id = str(line_number)
    elif type(request_id) not in (str, int):
        raise InvalidArgument(
            f"{location}: {id_field} must be text or a whole number; found {request_id!r:.100}"
        )
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
    supported = _CHAT_FIELDS if is_chat else _PROMPT_FIELDS
    for name, value in body.items():
        is_default = name in _DEFAULT_ONLY_FIELDS and value == _DEFAULT_ONLY_FIELDS[name]
        if name not in supported and value is not None and not is_default:
            of_prompts = "" if is_chat or name not in _CHAT_FIELDS else " beside a prompt"
            raise InvalidArgument(
                f"{location}: {name} is not supported in a batch{of_prompts}; leave it out"
            )
    if not isinstance(body.get("reasoning_effort"), str | None):
        raise InvalidArgument(f"{location}: reasoning_effort must be text")
    for name in ("chat_template_kwargs", "response_format"):
        if not isinstance(body.get(name), dict | None):
            raise InvalidArgument(f"{location}: {name} must be an object")
    for name in _MAX_TOKENS_FIELDS:
        limit = body.get(name)
        if limit is not None and (type(limit) is not int or limit < -1 or not limit):
            raise InvalidArgument(
                f"{location}: {name} must be a number of tokens, or -1 for no limit; "
                f"found {limit!r}"
            )
    stops = [] if body.get("stop") is None else body["stop"]  # text is a sequence of texts, too
    if not isinstance(stops, str | list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidArgument(f"{location}: stop must be text, or a list of texts")
