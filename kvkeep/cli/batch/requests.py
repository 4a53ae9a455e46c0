"""What is to be asked: lines of a JSONL file, or the files of a folder."""

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
# Fields with the only value for which an answer is what was asked for.
_USUAL: Mapping[str, Any] = {"n": 1, "stream": False, "logprobs": False, "tools": [], "echo": False}


@dataclass(frozen=True)
class BatchRequest:
    """One prompt.

    name: its own, or its line's number. where: for messages. digest: of all that was asked for, so
    that a result is known again. body: the fields of an OpenAI request. chat: whether it has
    messages. openai: whether the line is one of OpenAI's batches, and so is its result.
    """

    name: str
    where: str
    digest: str
    body: Mapping[str, Any]
    chat: bool
    openai: bool = False

    def ask(self, model: "Model", usual: "Sampling", most: int) -> "GenerationRequest":
        """usual: for what the line does not say. Raises InvalidArgument."""
        from kvkeep.engine import GenerationRequest

        try:
            ids = self._ids(model)
            if not ids:
                raise InvalidArgument("the prompt is empty")
            length = next((self.body[each] for each in _LENGTHS if self.body.get(each)), most)
            return GenerationRequest(tuple(ids), length, self._sampling(usual))
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.where}: {error}") from error

    def _ids(self, model: "Model") -> list[int]:
        if self.chat:
            return model.text.encode(model.text.chat(self.body["messages"]))
        return model.text.encode(self.body["prompt"])

    def _sampling(self, usual: "Sampling") -> "Sampling":
        from dataclasses import replace

        said = {each: self.body[each] for each in _SAMPLING if self.body.get(each) is not None}
        stop = self.body.get("stop")
        if stop is not None:
            said["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        # Each draws from a seed of its own, which is the same when the batch is taken up again.
        if "seed" not in said and usual.seed is not None:
            said["seed"] = (usual.seed + int(self.digest[:8], 16)) % 2**32
        return replace(usual, **said)


def read_jsonl(path: Path) -> list[BatchRequest]:
    """Raises InvalidArgument, naming the line, for one that cannot be asked; OSError."""
    found: list[BatchRequest] = []
    for number, line in enumerate(read_text_file(path).splitlines(), 1):
        if line.strip():
            found.append(_of_line(line, number, f"{path}, line {number}"))
    return _checked(found, path)


def read_folder(folder: Path, question: str, system: str | None) -> list[BatchRequest]:
    """A chat for each file: its text, and then the question."""
    found: list[BatchRequest] = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            said = [{"role": "user", "content": f"{read_text_file(path).strip()}\n\n{question}"}]
            head = [] if system is None else [{"role": "system", "content": system}]
            found.append(_request(path.name, str(path), {"messages": [*head, *said]}, True))
    return _checked(found, folder)


def _checked(found: list[BatchRequest], source: Path) -> list[BatchRequest]:
    if not found:
        raise InvalidArgument(f"{source}: there is nothing to ask")
    names: dict[str, str] = {}
    for each in found:
        if each.name in names:
            raise InvalidArgument(f"{each.where} has the name of {names[each.name]}: {each.name!r}")
        names[each.name] = each.where
    return found


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
    _require_askable(body, where, chat)
    return _request(name, where, body, chat, openai)


def _require_askable(body: Mapping[str, Any], where: str, chat: bool) -> None:
    if chat == ("prompt" in body):
        raise InvalidArgument(f"{where}: give messages, or a prompt")
    if not chat and not isinstance(body["prompt"], str):
        raise InvalidArgument(f"{where}: a prompt is text")
    for name, value in body.items():
        if name not in _KNOWN and (name not in _USUAL or (value or _USUAL[name]) != _USUAL[name]):
            raise InvalidArgument(f"{where}: {name} is nothing that a batch can do; leave it out")
    for name in _LENGTHS:
        length = body.get(name)
        if length is not None and (not isinstance(length, int) or length < 1):
            raise InvalidArgument(f"{where}: {name} is a number of tokens; found {length!r}")
    stop = body.get("stop")
    if stop is not None and not isinstance(stop, str) and not _all_text(stop):
        raise InvalidArgument(f"{where}: stop is text, or a list of texts")


def _all_text(value: Any) -> bool:
    return isinstance(value, Iterable) and all(isinstance(each, str) for each in value)


def _request(
    name: str, where: str, body: Mapping[str, Any], chat: bool, openai: bool = False
) -> BatchRequest:
    said = json.dumps([name, body], sort_keys=True, ensure_ascii=True)
    digest = hashlib.sha256(said.encode()).hexdigest()[:24]
    return BatchRequest(name, where, digest, body, chat, openai)
