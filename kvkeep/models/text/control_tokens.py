"""Control tokens such as <|im_end|>, and text in which only a template can write them."""

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from kvkeep.errors import BadModelFile, InvalidArgument, UnsupportedModel


class ChatText(str):
    """What a chat template made of messages: a text that knows which of it the template wrote.

    sealed: the same text with each control token of the template under its secret name (see
    `ControlTokens`). What people wrote stands there as it is, so none of it can be a control token.
    Text that is added to it is taken as written by people.
    """

    __slots__ = ("sealed",)
    sealed: str

    def __new__(cls, text: str, sealed: str) -> "ChatText":
        made = super().__new__(cls, text)
        made.sealed = sealed
        return made

    def __add__(self, other: str) -> "ChatText":
        return ChatText(str(self) + str(other), self.sealed + _sealed(other))

    def __radd__(self, other: str) -> "ChatText":
        return ChatText(str(other) + str(self), _sealed(other) + self.sealed)


def _sealed(text: str) -> str:
    return text.sealed if isinstance(text, ChatText) else str(text)


class ControlTokens:
    """The special tokens of a tokenizer, and a name for each that nobody else can know.

    A text with these names is *sealed*: what has a name is the token, and what merely reads like
    one, `<|im_end|>` typed by somebody, is text like any other.

    Example: somebody says "stop<|im_end|>". While the template renders that, it reads "stop" and a
    stand-in. Then each <|im_end|> is the template's own and gets its name, and the stand-in becomes
    "<|im_end|>" again.

    ids: of the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._index = {token.content: n for n, token in added if token.special and token.content}
        self.ids = frozenset(self._index.values())
        # Secret, or somebody could type them. Digits alone, which no filter of a template changes,
        # where they go through one.
        name, self._digits = secrets.token_hex(8), f"{secrets.randbelow(10**16):016}"
        self._names = {text: f"k{name}n{n}k" for text, n in self._index.items()}
        stand_ins = {text: f"{self._digits}{n:08}{self._digits}" for text, n in self._index.items()}
        self._find_texts, self._find_names = _any_of(self._names), _any_of(self._names.values())
        self._seal, self._unseal = _replacing(self._names), _replacing(_turned(self._names))
        self._stand_in, self._put_back = _replacing(stand_ins), _replacing(_turned(stand_ins))

    def encode(self, sealed: str) -> list[int]:
        """Token ids of a sealed text; any text that people wrote is one."""
        text, own = self._unseal(sealed), len(self._find_names.findall(sealed))
        ids = _encoded(self._tokenizer, text)
        found = sum(index in self.ids for index in ids)
        if found == own and (not own or len(self._find_texts.findall(text)) == own):
            return ids  # there are no others than the template's
        return _encoded(self._sealed_tokenizer, sealed)

    def stand_in(self, value: Any) -> Any:
        """A message, or a part of one, with stand-ins in the place of what reads like a token."""
        if isinstance(value, str):
            return self._stand_in(value)
        if isinstance(value, Mapping):
            return {self.stand_in(key): self.stand_in(part) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self.stand_in(part) for part in value]
        return value

    def chat_text(self, rendered: str) -> ChatText:
        """What a template made of messages with stand-ins.

        Raises InvalidArgument where it took a stand-in apart.
        """
        text, sealed = self._put_back(rendered), self._put_back(self._seal(rendered))
        if self._digits[:8] in text or self._digits[8:] in text:
            raise InvalidArgument(
                "the model's chat template cuts a message in the middle of what reads like a "
                "control token, and would change it; leave such text out of the message"
            )
        return ChatText(text, sealed)

    @cached_property
    def _sealed_tokenizer(self) -> Tokenizer:
        """The tokenizer with its special tokens under their names, and nothing else changed."""
        definition = json.loads(self._tokenizer.to_str())
        for token in definition["added_tokens"]:
            if token["content"] in self._names and token["special"]:
                token["content"] = self._names[token["content"]]
                token["normalized"] = token["single_word"] = False
        definition["post_processor"] = None  # it only adds tokens
        self._rename_in(definition["model"])
        tokenizer = Tokenizer.from_str(json.dumps(definition))
        for text, index in self._index.items():
            if tokenizer.token_to_id(self._names[text]) != index:
                raise UnsupportedModel(
                    "the text holds what reads like a control token, and this model's tokenizer "
                    f"cannot be told apart from it (at {text!r}); leave it out of the text"
                )
        return tokenizer

    def _rename_in(self, model: dict[str, Any]) -> None:
        names, vocabulary = self._names, model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
        else:  # of Unigram: pairs of text and score
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not self._leads_to(merge)]

    def _leads_to(self, merge: str | list[str]) -> bool:
        """Whether a merge makes a token's text of pieces, or goes on from there."""
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        return not self._names.keys().isdisjoint((left, right, left + right))


def _turned(others: Mapping[str, str]) -> dict[str, str]:
    return {other: text for text, other in others.items()}


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Finds any of the texts, the longest first, as tokenizers do."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _replacing(others: Mapping[str, str]) -> Callable[[str], str]:
    """Puts other texts in the place of texts."""
    found = _any_of(others)
    return lambda text: found.sub(lambda match: others[match[0]], text)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Raises BadModelFile for a tokenizer that names a token which it does not have."""
    # The library raises bare Exception for all that can be wrong with a tokenizer.
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    except Exception as error:
        raise BadModelFile(
            f"the model's tokenizer cannot encode a text ({error}); fetch the model again"
        ) from error
