"""`logprobs` of completions: of sampled tokens, and of the tokens of an echoed prompt."""

import codecs
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.engine import GeneratedToken, TokenLogprob
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.scoring import TokenScores
from kvkeep.session.streaming import token_texts


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's tokens, its text as it is echoed, and where in that each token begins."""

    ids: list[int]
    text: str
    offsets: Sequence[int]

    @classmethod
    def of(cls, prompt: str | Sequence[int], tokenizer: TextCodec) -> "EncodedPrompt":
        """Encode a text, behind the ids that open one, or take token ids as they are."""
        opening = tokenizer.opening_ids if isinstance(prompt, str) else []
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        texts = token_texts(tokenizer, (), ids)
        text = prompt if isinstance(prompt, str) else "".join(texts)
        ends = itertools.accumulate(map(len, texts), initial=0)
        offsets = [min(end, len(text)) for end, _ in zip(ends, ids, strict=False)]
        return cls([*opening, *ids], text, [*(0 for _ in opening), *offsets])


class CompletionLogprobs:
    """The log probabilities of one choice's tokens, in the form of completions.

    Offsets count characters of the choice's whole text, also in a stream. Tokens that share a
    character have the offset at which it begins.
    """

    def __init__(self, tokenizer: TextCodec, offset: int = 0):
        """offset: characters of the choice's text before its first token: those of an echo."""
        self._tokenizer, self._offset = tokenizer, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def entry(self, sampled_tokens: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        """Return the choice's field `logprobs` for its next tokens; None if they have none."""
        scored = [(event, event.logprob) for event in sampled_tokens if event.logprob is not None]
        if not scored:
            return None
        return {
            "tokens": [self._token_text(event.token) for event, _ in scored],
            "token_logprobs": [logprob.logprob for _, logprob in scored],
            "top_logprobs": [
                self._logprobs_by_text([*event.top_logprobs, logprob]) for event, logprob in scored
            ],
            "text_offset": [self._advance_offset(event.token) for event, _ in scored],
        }

    def prompt_entry(self, prompt: EncodedPrompt, scores: Sequence[TokenScores]) -> dict[str, Any]:
        """Return the field for the tokens of a prompt, of which the first has no probability.

        scores: of all of its tokens, step by step.
        """
        logprobs = [value for step in scores for value in step.logprobs.tolist()]
        tops = [row for step in scores for row in _top_rows(step)]
        by_text = [
            self._logprobs_by_text([*top, TokenLogprob(token, logprob)])
            for top, token, logprob in zip(tops, prompt.ids, logprobs, strict=True)
        ]
        return {
            "tokens": [self._token_text(token) for token in prompt.ids],
            "token_logprobs": [None, *logprobs[1:]],
            "top_logprobs": [None, *by_text[1:]],
            "text_offset": list(prompt.offsets),
        }

    def _logprobs_by_text(self, logprobs: Iterable[TokenLogprob]) -> dict[str, float]:
        """Map texts to log probabilities; a text that is taken is replaced by the token's id."""
        logprobs_by_text: dict[str, float] = {}
        for token, logprob in {entry.token: entry.logprob for entry in logprobs}.items():
            text = self._token_text(token)
            text = f"token_id:{token}" if text in logprobs_by_text else text
            logprobs_by_text[text] = logprob
        return logprobs_by_text

    def _token_text(self, token: int) -> str:
        token_bytes = self._tokenizer.token_bytes(token)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return f"bytes:{token_bytes.decode(errors='backslashreplace')}"

    def _advance_offset(self, token: int) -> int:
        """Return the token's offset, and move on to that of the next token."""
        offset = self._offset
        # Control tokens are not part of the text, but end half a character before them.
        is_control = self._tokenizer.is_control(token)
        text_bytes = b"" if is_control else self._tokenizer.token_bytes(token)
        self._offset += len(self._decoder.decode(text_bytes, final=is_control))
        return offset


def joined_entries(*entries: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return one field `logprobs` for consecutive tokens; None if none of them has one."""
    present = [entry for entry in entries if entry is not None]
    if not present:
        return None
    return {name: [item for entry in present for item in entry[name]] for name in present[0]}


def _top_rows(scores: TokenScores) -> list[list[TokenLogprob]]:
    rows = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    return [list(map(TokenLogprob, ids, logprobs)) for ids, logprobs in rows]
