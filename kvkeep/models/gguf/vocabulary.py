"""The tokens in a GGUF file: their texts, kinds, scores and merges, checked against each other.

Where llama.cpp loads a file that leaves something out or contradicts itself in a way that few texts
meet, so does kvkeep, with a warning.
"""

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from tokenizers.models import BPE

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.file import GgufFile, shown

# What a token is, as GGUF numbers it. All others are of text.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
_ROLE = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def special_id(file: GgufFile, role: str) -> int | None:
    """The id of the token that the file names for a role: "bos", "eos", "unknown", "padding".

    None where it names none, and with a warning where that is outside its vocabulary. Raises
    BadModelFile where it is no whole number.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    if not file.has(key):
        return None
    index, tokens = file.integer(key), file.texts("tokenizer.ggml.tokens")
    if 0 <= index < len(tokens):
        return index
    _warn(
        f"{file.path} names {index} as its {role} token, outside its {len(tokens)} tokens: the "
        f"model is loaded without a {role} token"
    )
    return None


def special_token(file: GgufFile, role: str) -> str | None:
    """The text of `special_id`'s token."""
    index = special_id(file, role)
    return None if index is None else Vocabulary.read(file).tokens[index]


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True)
class Vocabulary:
    """tokens: their texts by id. types: what each is."""

    file: GgufFile
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, file: GgufFile) -> Self:
        """Raises BadModelFile where tokens are missing, or types do not match them.

        Warns of types that are missing, and of tokens whose text another one has.
        """
        tokens = file.texts("tokenizer.ggml.tokens")
        types = _types(file, tokens)
        if len(types) != len(tokens):
            raise BadModelFile(
                f"{file.path} has {len(tokens)} tokens and {len(types)} token types; fetch it again"
            )
        return cls(file, *_told_apart(file, tokens, types))

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The id of each text."""
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, *types: int) -> list[str]:
        """The texts of all tokens of these types, by id."""
        pairs = zip(self.tokens, self.types, strict=True)
        return [token for token, kind in pairs if kind in types]

    def scores(self) -> list[float]:
        """The score of each token. Raises BadModelFile if they are missing or no numbers."""
        scores = self.file.numbers("tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            raise BadModelFile(
                f"{self.file.path} has {len(self.tokens)} tokens and {len(scores)} scores; fetch "
                "it again"
            )
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """The pairs of texts that become one, the first ones first.

        Raises BadModelFile if they are missing or malformed.
        """
        merges = []
        for merge in self.file.texts("tokenizer.ggml.merges"):
            left, space, right = merge.partition(" ")
            if not space:
                raise BadModelFile(
                    f"{self.file.path} has a malformed merge {merge!r}; fetch it again"
                )
            merges.append((left, right))
        return merges

    def byte_pairs(self, merges: Collection[tuple[str, str]], **how: Any) -> BPE:
        """The tokens under these merges; how: as `BPE` has it.

        Raises BadModelFile for merges of what is no token.
        """
        # The library raises bare Exception for all that can be wrong with them.
        try:
            return BPE(vocab=dict(self.ids), merges=list(merges), **how)
        except Exception as error:
            raise BadModelFile(
                f"{self.file.path} has merges that do not fit its tokens ({error}); fetch it again"
            ) from error


def _types(file: GgufFile, tokens: Sequence[str]) -> list[int]:
    """What each token is. Without types, tokens with a role are control tokens, others are text."""
    key = "tokenizer.ggml.token_type"
    if file.has(key):
        return file.integers(key)
    _warn(
        f"{file.path} does not say which of its tokens are control tokens ({key}): only those that "
        "it names for a role, such as eos, count as such; take a newer file of the model"
    )
    types = [BYTE if _BYTE.fullmatch(token) else NORMAL for token in tokens]
    for role, index in _roles(file, tokens).items():
        types[index] = UNKNOWN if role == "unknown" else CONTROL
    return types


def _roles(file: GgufFile, tokens: Sequence[str]) -> dict[str, int]:
    """The ids of tokens that have a role, by role."""
    named = filter(None, map(_ROLE.fullmatch, file.metadata))
    ids = {name[1]: file.integer(name[0]) for name in named}
    return {role: index for role, index in ids.items() if 0 <= index < len(tokens)}


def _told_apart(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """The tokens under texts that are all different, and their types.

    Of several with one text the one with a role keeps it, or else the last, which is the one that
    llama.cpp finds. The others are control tokens under names that no text has.
    """
    keepers = {token: index for index, token in enumerate(tokens)}
    keepers |= {tokens[index]: index for index in _roles(file, tokens).values()}
    if len(keepers) == len(tokens):
        return tokens, types
    tokens, types = list(tokens), list(types)
    others = [index for index, token in enumerate(tokens) if keepers[token] != index]
    _warn(
        f"{file.path} has {len(others)} tokens whose text another one has ({shown(others)}): no "
        "text is encoded to these"
    )
    for index in others:
        tokens[index], types[index] = f"<duplicate token {index}>", CONTROL
    return tokens, types
