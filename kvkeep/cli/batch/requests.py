"""The requests of a batch: lines of a JSONL file, or the files of a folder."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import read_text_file

if TYPE_CHECKING:
    from kvkeep import Model, Sampling
    from kvkeep.engine import GenerationRequest

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_LENGTHS = ("max_completion_tokens", "max_tokens")
_KNOWN = {*_SAMPLING, *_LENGTHS, "messages", "prompt", "stop", "model", "user", "id", "metadata"}
# Fields that are accepted only with their default value.
_DEFAULTS: Mapping[str, Any] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "tools": [],
    "echo": False,
}


@dataclass(frozen=True)
class BatchRequest:
    """One prompt with its parameters.

    name: its id, or the number of its line. where: its file and line, for messages. digest: a hash
    of the name and body, by which a resumed batch recognises its results. body: the fields of an
    OpenAI request. chat: whether it has messages. openai: whether the line, and so its result, has
    the format of an OpenAI batch.
    """

    name: str
    where: str
    digest: str
    body: Mapping[str, Any]
    chat: bool
    openai: bool = False

    def ask(self, model: "Model", usual: "Sampling", most: int) -> "GenerationRequest":
        """Return the engine's request.

        usual: the sampling for fields that are missing. most: the token limit if the line has none.
        Raises InvalidArgument.
        """
        from kvkeep.engine import GenerationRequest

        try:
            ids = self._ids(model)
            if not ids:
                raise InvalidArgument("the prompt is empty")
            length = next((self.body[name] for name in _LENGTHS if self.body.get(name)), most)
            return GenerationRequest(tuple(ids), length, self._sampling(usual))
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.where}: {error}") from error

    def _ids(self, model: "Model") -> list[int]:
        if self.chat:
            return model.text.encode(model.text.chat(self.body["messages"]))
        return model.text.encode(self.body["prompt"])

    def _sampling(self, usual: "Sampling") -> "Sampling":
        from dataclasses import replace

        values = {n: self.body[n] for n in _SAMPLING if self.body.get(n) is not None}
        stop = self.body.get("stop")
        if stop is not None:
            values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        # Each request has its own seed, which is the same when the batch is resumed.
        if "seed" not in values and usual.seed is not None:
            values["seed"] = (usual.seed + int(self.digest[:8], 16)) % 2**32
        return replace(usual, **values)


def read_jsonl(path: Path) -> list[BatchRequest]:
    """Read a request from each line that is not empty.

    Raises InvalidArgument, naming the line, for an invalid request; OSError.
    """
    requests: list[BatchRequest] = []
    for number, line in enumerate(read_text_file(path).splitlines(), 1):
        if line.strip():
            requests.append(_of_line(line, number, f"{path}, line {number}"))
    return _checked(requests, path)


def read_folder(folder: Path, question: str, system: str | None) -> list[BatchRequest]:
    """Make a chat request of each file: its text, followed by the question."""
    requests: list[BatchRequest] = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            user = [{"role": "user", "content": f"{read_text_file(path).strip()}\n\n{question}"}]
            head = [] if system is None else [{"role": "system", "content": system}]
            requests.append(_request(path.name, str(path), {"messages": [*head, *user]}, True))
    return _checked(requests, folder)


def _checked(requests: list[BatchRequest], source: Path) -> list[BatchRequest]:
    """Return the requests. Raises InvalidArgument if there are none, or if two have one name."""
    if not requests:
        raise InvalidArgument(f"{source}: there is nothing to ask")
    names: dict[str, str] = {}
    for request in requests:
        name = request.name
        if name in names:
            raise InvalidArgument(f"{request.where} has the name of {names[name]}: {name!r}")
        names[name] = request.where
    return requests


def _of_line(line: str, number: int, where: str) -> BatchRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where}: a request is a JSON object")
    openai = "body" in entry
    body = entry["body"] if openai else entry
    name = str(entry.get("custom_id" if openai else "id") or number)
    if not isinstance(body, dict):
        raise InvalidArgument(f"{where}: the body is a JSON object")
    url = entry.get("url", _CHAT) if openai else ""
    if openai and url not in (_CHAT, _COMPLETION):
        raise InvalidArgument(f"{where}: the url is {_CHAT} or {_COMPLETION}; found {url!r}")
    chat = "messages" in body
    _check_body(body, where, chat)
    return _request(name, where, body, chat, openai)


def _check_body(body: Mapping[str, Any], where: str, chat: bool) -> None:
    """Raise InvalidArgument for fields that are missing, unsupported or of the wrong type."""
    if chat == ("prompt" in body):
        raise InvalidArgument(f"{where}: give messages, or a prompt")
    if not chat and not isinstance(body["prompt"], str):
        raise InvalidArgument(f"{where}: a prompt is text")
    for name, value in body.items():
        if name not in _KNOWN and (
            name not in _DEFAULTS or (value or _DEFAULTS[name]) != _DEFAULTS[name]
        ):
            raise InvalidArgument(f"{where}: {name} is not supported in a batch; leave it out")
    for name in _LENGTHS:
        length = body.get(name)
        if length is not None and (not isinstance(length, int) or length < 1):
            raise InvalidArgument(f"{where}: {name} is a number of tokens; found {length!r}")
    stop = body.get("stop")
    if stop is not None and not isinstance(stop, str) and not _all_text(stop):
        raise InvalidArgument(f"{where}: stop is text, or a list of texts")


def _all_text(value: Any) -> bool:
    return isinstance(value, Iterable) and all(isinstance(item, str) for item in value)


def _request(
    name: str, where: str, body: Mapping[str, Any], chat: bool, openai: bool = False
) -> BatchRequest:
    text = json.dumps([name, body], sort_keys=True, ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return BatchRequest(name, where, digest, body, chat, openai)
