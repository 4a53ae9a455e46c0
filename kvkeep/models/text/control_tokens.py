"""Protection of control tokens such as <|im_end|>: only a chat template can write them.

Text of users that reads like a control token is replaced by placeholders before rendering, and
control tokens in the template's own texts by secret names. After it the placeholders become text
again. A text with secret names is *sealed*. It is encoded with a tokenizer whose control tokens
have these names. Text that only becomes a control token's by rendering, such as "<|im_/thinkend|>"
in a template that deletes "/think", has no secret name and stays text.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from kvkeep.errors import BadModelFile, InvalidArgument, UnsupportedModel
from kvkeep.models.text.alternation import alternation
from kvkeep.models.text.template_texts import TemplateTexts

_LONG_TEXT = 10_000  # characters
_ROLES = frozenset(("system", "developer", "user", "assistant", "model", "tool"))


class ChatText(str):
    """A rendered chat that records which control tokens the template wrote.

    sealed: the same text with the secret names of these control tokens. Text that is concatenated
    counts as user text.
    """

    __slots__ = ("sealed",)
    sealed: str

    def __new__(cls, text: str, sealed: str) -> "ChatText":
        chat = super().__new__(cls, text)
        chat.sealed = sealed
        return chat

    def __add__(self, other: str) -> "ChatText":
        return ChatText(str(self) + str(other), self.sealed + _sealed_text(other))

    def __radd__(self, other: str) -> "ChatText":
        return ChatText(str(other) + str(self), _sealed_text(other) + self.sealed)


def _sealed_text(text: str) -> str:
    return text.sealed if isinstance(text, ChatText) else str(text)


class ControlTokens:
    """The special tokens of a tokenizer, each with a secret name and a placeholder.

    Example: a user message is "stop<|im_end|>". The template renders "stop", a placeholder, and the
    secret name of its own <|im_end|>. Then the placeholder becomes "<|im_end|>" again, which is
    plain text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._sealed_lock = tokenizer, Lock()
        self._texts = lru_cache(maxsize=8)(lambda source: TemplateTexts(source, self._seal))
        added = tokenizer.get_added_tokens_decoder().items()
        self._ids_by_text = {
            token.content: token_id for token_id, token in added if token.special and token.content
        }
        self.ids = frozenset(self._ids_by_text.values())
        # Random: users cannot type them. Placeholders are digits, which no template filter changes.
        secret, digits = secrets.token_hex(8), f"{secrets.randbelow(10**16):016}"
        self._secret = secret
        names = {text: f"k{secret}n{token_id}k" for text, token_id in self._ids_by_text.items()}
        placeholders = {
            text: f"{digits}{token_id:08}{digits}" for text, token_id in self._ids_by_text.items()
        }
        self._secret_names, self._placeholder_digits = names, digits
        self._ids_by_name = {name: self._ids_by_text[text] for text, name in names.items()}
        self._text_pattern, self._name_pattern = alternation(names), alternation(names.values())
        self._seal, self._unseal = _replacer(names), _replacer(_inverted(names))
        self._insert_placeholders = _replacer(placeholders)
        self._remove_placeholders = _replacer(_inverted(placeholders))

    def encode(self, sealed: str) -> list[int]:
        """Return the token ids of a sealed text. Plain text is a sealed text without names."""
        text, name_count = self._unseal(sealed), len(self._name_pattern.findall(sealed))
        ids = _encode(self._tokenizer, text)
        control_count = sum(token_id in self.ids for token_id in ids)
        text_count = len(self._text_pattern.findall(text)) if name_count else 0
        if control_count == name_count == text_count:
            return ids  # fast path: all control tokens are the template's
        with self._sealed_lock:  # of two threads, one builds it
            tokenizer = self._sealed_tokenizer
        return _encode(tokenizer, sealed)

    def unsealed(self, sealed: str) -> ChatText:
        """Return the chat text of a sealed text."""
        return ChatText(self._unseal(sealed), sealed)

    def places(self, sealed: str, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and id of each control token between two places of a sealed text."""
        for match in self._name_pattern.finditer(sealed, start, end):
            yield match.start(), match.end(), self._ids_by_name[match[0]]

    def with_placeholders(self, value: Any) -> Any:
        """Return messages, or a part of one, with placeholders for texts of control tokens."""
        replace = self.with_placeholders
        if isinstance(value, str):
            return self._insert_placeholders(value)
        if isinstance(value, Mapping):
            return {replace(key): replace(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [replace(item) for item in value]
        return value

    def without_secrets(self, rendered: str) -> str:
        """Return a template's output with the texts of control tokens, for people to read."""
        return self._unseal(self._remove_placeholders(rendered))

    def template_texts(self, source: str) -> TemplateTexts:
        """Return the texts of a template: the same object for each rendering."""
        return self._texts(source)

    def chat_text(
        self, rendered: str, texts: TemplateTexts | None = None, roles: Collection[str] = ()
    ) -> ChatText:
        """Return the chat for a template's output, with placeholders and secret names.

        texts: of the template; None if all of the text is a template's. roles: of the messages.
        Raises InvalidArgument if the template split a placeholder or a secret name.
        """
        sealed = self._remove_placeholders(self._seal_composed(rendered, texts, roles))
        text, digits = self._unseal(sealed), self._placeholder_digits
        if digits[:8] in text or digits[8:] in text or self._secret in text:
            raise InvalidArgument(
                "the model's chat template truncates a message inside text that looks like a "
                "control token; remove such text from the message"
            )
        return ChatText(text, sealed)

    def _seal_composed(
        self, rendered: str, texts: TemplateTexts | None, roles: Collection[str]
    ) -> str:
        """Give secret names to control tokens that the template wrote in parts."""
        if texts is None:
            return self._seal(rendered)
        written = set(self._text_pattern.findall(rendered))
        composed = {text for text in written if texts.composes(text, _ROLES.union(roles))}
        return _replacer({text: self._secret_names[text] for text in composed})(rendered)

    @cached_property
    def _sealed_tokenizer(self) -> Tokenizer:
        """A copy of the tokenizer whose special tokens have their secret names as texts."""
        definition = json.loads(self._tokenizer.to_str())
        for entry in definition["added_tokens"]:
            if entry["content"] in self._secret_names and entry["special"]:
                entry["content"] = self._secret_names[entry["content"]]
                entry["normalized"] = entry["single_word"] = False
        definition["post_processor"] = None  # it only adds tokens such as BOS
        self._rename_in_model(definition["model"])
        tokenizer = Tokenizer.from_str(json.dumps(definition))
        for text, token_id in self._ids_by_text.items():
            if tokenizer.token_to_id(self._secret_names[text]) != token_id:
                raise UnsupportedModel(
                    "the text contains a control token's text, which this model's tokenizer cannot "
                    f"tell apart from the token (at {text!r}); remove it from the text"
                )
        return tokenizer

    def _rename_in_model(self, model: dict[str, Any]) -> None:
        """Give the special tokens their secret names in "model" of tokenizer.json."""
        names, vocabulary = self._secret_names, model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
        else:  # Unigram: pairs of text and score
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            # Without those that use or produce the text of a special token.
            model["merges"] = [
                (left, right)
                for left, right in model["merges"]
                if names.keys().isdisjoint((left, right, left + right))
            ]


def _inverted(mapping: Mapping[str, str]) -> dict[str, str]:
    return {value: key for key, value in mapping.items()}


def _replacer(replacements: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces each key in a text by its value."""
    pattern = alternation(replacements)
    return lambda text: pattern.sub(lambda match: replacements[match[0]], text)


def encoded_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, whose texts of control tokens are these tokens.

    A long text, which takes a second for each million characters, does not stop other threads.
    """
    if len(text) < _LONG_TEXT:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)  # without the GIL
    return list(encoding.ids)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text. Raises BadModelFile for a tokenizer that names a missing token."""
    # The library raises bare Exception for every fault of a tokenizer.
    try:
        return encoded_ids(tokenizer, text)
    except Exception as error:
        raise BadModelFile(
            f"the model's tokenizer cannot encode a text ({error}); fetch the model again"
        ) from error
