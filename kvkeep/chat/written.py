"""Memory of the tokens of generated answers, for when clients send these answers back.

A client sends an answer back in its own bytes: calls as canonical JSON, texts without the white
space around them. Tokenized anew, the history would differ from the cells that hold it. So the
tokens that the model sampled are remembered by what they say.
"""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvkeep.chat.messages import Message, ReasoningPart
from kvkeep.chat.output import Output
from kvkeep.chat.output_format import OutputFormat
from kvkeep.models.text.codec import TextCodec

_MAX_EXACT = 2**53  # floats up to it may be integers: clients in JavaScript write 1.0 as 1
_SAME = 8  # the most answers that say the same
# Tokens of four bytes that an answer takes beside its own, and each id of its calls.
_ENTRY_COST, _CALL_COST = 184, 34
_OPENING_TOKENS = 64  # more than white space and a marker of reasoning have
_BEGINNING_TOKENS = 64  # more than most calls of one tool have in common
_RANDOM_ID = 9  # characters of an id that no other call has
_MAX_NOTED = 1000  # answers in the notes of one text, the last used ones
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class WrittenAnswer:
    """The sampled tokens of a complete answer, without its end token.

    prompt: digest of the prompt's ids. call_ids: of its calls, as the client got them. reasoning:
    digest, b"" for none. has_reasoning: whether the answer begins with reasoning, which may be
    empty; starts_in_reasoning: it began in the prompt.
    """

    ids: "array[int]"
    prompt: bytes
    call_ids: tuple[str, ...] = ()
    reasoning: bytes = b""
    has_reasoning: bool = False
    starts_in_reasoning: bool = False

    @property
    def cost(self) -> int:
        return len(self.ids) + _ENTRY_COST + _CALL_COST * len(self.call_ids)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` needs beside the ids and the prompt."""
        return {
            "calls": list(self.call_ids),
            "reasoning": self.reasoning.hex(),
            "has_reasoning": self.has_reasoning,
            "starts_in_reasoning": self.starts_in_reasoning,
        }

    @classmethod
    def from_json(cls, ids: "array[int]", prompt: bytes, fields: Any) -> "WrittenAnswer":
        """Return an answer. Raises LookupError, TypeError and ValueError for other fields."""
        return cls(
            ids,
            prompt,
            tuple(map(str, fields["calls"])),
            bytes.fromhex(fields["reasoning"]),
            bool(fields["has_reasoning"]),
            bool(fields["starts_in_reasoning"]),
        )

    def has_call_ids_of(self, message: Message) -> bool:
        """Whether the message's call ids are this answer's, and one is long enough to be random."""
        call_ids = tuple(call.id for call in message.calls)
        return call_ids == self.call_ids and any(len(i) >= _RANDOM_ID for i in call_ids)


FindWritten = Callable[[Message], Sequence[WrittenAnswer]]


class WrittenAnswers:
    """An LRU cache of each owner's sampled answers, keyed by a digest of their text and calls.

    The digest is of the text without white space around it, and of the calls' names and parsed
    arguments. Thread-safe.
    """

    def __init__(self, max_tokens: int = 2**21):
        """max_tokens: of all answers together; each counts for some more: see `cost`."""
        self._max_tokens = max_tokens
        self._answers: OrderedDict[tuple[str, bytes], tuple[WrittenAnswer, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self.tokens = 0  # that they count for
        # Called with each answer that is added: its owner, a digest of what it says, and itself.
        self.on_add: Callable[[str, bytes, WrittenAnswer], None] = lambda *_: None

    def add(self, owner: str, message: Message, answer: WrittenAnswer) -> None:
        """Remember an answer. message: what was read from its tokens."""
        digest = _content_digest(message)
        if digest is None or not answer.ids:
            return
        self.restore(owner, digest, answer)
        self.on_add(owner, digest, answer)

    def restore(self, owner: str, says: bytes, answer: WrittenAnswer) -> None:
        """Remember an answer again that was passed to `on_add`."""
        with self._lock:
            self._add((owner, says), answer)

    def entries(self) -> list[tuple[str, bytes, WrittenAnswer]]:
        """Return all answers, as they are passed to `on_add`, the last used last."""
        with self._lock:
            return [(*key, answer) for key, of in self._answers.items() for answer in of]

    def find(
        self, owner: str, message: Message, *, restore_reasoning: bool = True
    ) -> list[WrittenAnswer]:
        """Return the answers that say what a message says, the newest first.

        restore_reasoning: whether a message without reasoning matches answers with any, since many
        clients drop it.
        """
        digest = _content_digest(message)
        if digest is None:
            return []
        with self._lock:
            answers = self._answers.get((owner, digest), ())
            if answers:
                self._answers.move_to_end((owner, digest))
        reasoning = reasoning_digest(message)
        matches_any = restore_reasoning and not reasoning
        return [a for a in reversed(answers) if matches_any or a.reasoning == reasoning]

    def notes_of(self, owner: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Return notes, in JSON, of the owner's answers that a text contains; see `add_noted`."""
        with self._lock:
            newest_first = [
                (digest, answer)
                for (of, digest), answers in reversed(self._answers.items())
                for answer in reversed(answers)
                if of == owner
            ]
        if not newest_first:
            return []
        ids = array("i", tokens)
        places = _starts_of_beginnings(ids, [answer.ids for _, answer in newest_first])
        # A single token is almost anywhere: it counts where the text before it is the prompt.
        singles = {
            (answer.ids[0], answer.prompt) for _, answer in newest_first if len(answer.ids) == 1
        }
        starts_of_singles = _starts_of_singles(ids, singles)
        notes = list[dict[str, Any]]()
        for digest, answer in newest_first:
            length, starts = len(answer.ids), places.get(_beginning(answer.ids), ())
            if length == 1:
                starts = starts_of_singles.get((answer.ids[0], answer.prompt), ())
            for start in starts:
                if ids[start : start + length] == answer.ids:
                    notes.append(_note(digest, answer, start))
                    break
            if len(notes) == _MAX_NOTED:
                break
        return notes[::-1]

    def add_noted(self, owner: str, tokens: Sequence[int], notes: Any) -> None:
        """Remember the answers in a text by its notes, which are from `notes_of`; others are not.

        For texts that come back from a file, perhaps of another process.
        """
        try:
            noted = sorted((_from_note(note, tokens) for note in notes), key=lambda each: each[0])
        except (TypeError, ValueError, LookupError):  # not from `notes_of`
            return
        prompts = prefix_digests(tokens, (start for start, _, _ in noted))
        for (_, digest, answer), prompt in zip(noted, prompts, strict=True):
            with self._lock:
                self._add((owner, digest), replace(answer, prompt=prompt))

    def _add(self, key: tuple[str, bytes], answer: WrittenAnswer) -> None:
        others = tuple(o for o in self._pop(key) if (o.ids, o.prompt) != _identity(answer))
        self._answers[key] = (*others[1 - _SAME :], answer)
        self.tokens += sum(stored.cost for stored in self._answers[key])
        while self.tokens > self._max_tokens:
            self._pop(next(iter(self._answers)))

    def _pop(self, key: tuple[str, bytes]) -> tuple[WrittenAnswer, ...]:
        result = self._answers.pop(key, ())
        self.tokens -= sum(answer.cost for answer in result)
        return result


def _beginning(ids: "array[int]") -> bytes:
    return ids[:_BEGINNING_TOKENS].tobytes()


def _starts_of_beginnings(
    ids: "array[int]", answers: Sequence["array[int]"]
) -> dict[bytes, list[int]]:
    """Return the places of the beginnings of answers, of those with two tokens or more."""
    lengths = defaultdict[tuple[int, ...], set[int]](set)  # of beginnings, by their first two ids
    for answer in answers:
        lengths[tuple(answer[:2])].add(min(len(answer), _BEGINNING_TOKENS))
    beginnings, result = set(map(_beginning, answers)), defaultdict[bytes, list[int]](list)
    for start, pair in enumerate(pairwise(ids)):
        for length in lengths.get(pair, ()):
            beginning = ids[start : start + length].tobytes()
            if beginning in beginnings:
                result[beginning].append(start)
    return result


def _starts_of_singles(
    ids: "array[int]", singles: Set[tuple[int, bytes]]
) -> dict[tuple[int, bytes], list[int]]:
    """Return the places of answers of one token. singles: token, and digest of the prompt."""
    tokens = {token for token, _ in singles}
    starts = [start for start, token in enumerate(ids if tokens else ()) if token in tokens]
    prompts = zip(starts, prefix_digests(ids, starts), strict=True)
    places = ((start, (ids[start], prompt)) for start, prompt in prompts)
    return {place: [start] for start, place in places if place in singles}


def _identity(answer: WrittenAnswer) -> "tuple[array[int], bytes]":
    return answer.ids, answer.prompt


def _note(digest: bytes, answer: WrittenAnswer, start: int) -> dict[str, Any]:
    return {
        "says": digest.hex(),
        "start": start,
        "tokens": len(answer.ids),
        **answer.to_json(),
    }


def _from_note(note: Any, tokens: Sequence[int]) -> tuple[int, bytes, WrittenAnswer]:
    """Return an answer's start, digest, and the answer, without the digest of its prompt."""
    start, length = int(note["start"]), int(note["tokens"])
    if not 0 <= start < start + length <= len(tokens):
        raise ValueError("the answer is not in the text")
    answer = WrittenAnswer.from_json(array("i", tokens[start : start + length]), b"", note)
    return start, bytes.fromhex(note["says"]), answer


def written_answer(
    output: Output,
    ids: Sequence[int],
    output_format: OutputFormat,
    codec: TextCodec,
    prompt: Sequence[int],
    starts_in_reasoning: bool = False,
    call_ids: Sequence[str] = (),
) -> WrittenAnswer | None:
    """Return a complete answer; None if its tokens say more than was read from them.

    output: read from the tokens `ids`, which answer the prompt's. call_ids: as the client got them.
    """
    controls = {text for token in ids if (text := codec.control_text(token))}
    kinds = [isinstance(part, ReasoningPart) for part in output.parts]
    is_whole = all(call.complete for call in output.calls)
    if not controls <= output_format.control_markers or any(kinds[1:]) or not is_whole:
        return None
    first_text = codec.decode(ids[:_OPENING_TOKENS]).lstrip()
    opens_reasoning = first_text.startswith(tuple(m.start for m in output_format.reasoning))
    return WrittenAnswer(
        array("i", ids),
        tokens_digest(prompt),
        tuple(call_ids),
        reasoning_digest(output.message()),
        starts_in_reasoning or opens_reasoning or any(kinds),
        starts_in_reasoning,
    )


def tokens_digest(ids: Sequence[int]) -> bytes:
    """Return a digest of token ids."""
    return _digest(array("i", ids).tobytes())


def prefix_digests(ids: Sequence[int], lengths: Iterable[int]) -> Iterator[bytes]:
    """Yield the `tokens_digest` of the first tokens, for several counts of them in order."""
    digest, end = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0
    for length in lengths:
        digest.update(array("i", ids[end:length]).tobytes())
        end = length
        yield digest.digest()


def reasoning_digest(message: Message) -> bytes:
    """Return a digest of a message's reasoning without white space around it; b"" for none."""
    reasoning = message.reasoning.strip()
    return _digest(reasoning.encode(errors="surrogatepass")) if reasoning else b""


def _content_digest(message: Message) -> bytes | None:
    """Return a digest of what an assistant's message says; None if it says nothing."""
    text = message.text.strip()
    calls = [[call.name, _canonical(call.arguments)] for call in message.calls]
    if message.role != "assistant" or not (text or calls):
        return None
    return _digest(json.dumps([text, calls], sort_keys=True).encode())


def _canonical(value: Any) -> Any:
    """Return a JSON value with one form for equal numbers: 1 for 1.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT:
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(member) for key, member in value.items()}
    return list(map(_canonical, value)) if isinstance(value, list) else value


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
