"""The vocabulary in a GGUF file: texts, types, scores and merges, checked against each other.

Gaps and contradictions that llama.cpp tolerates are tolerated here as well, with a warning.
"""

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from tokenizers.models import BPE

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.file import GgufFile, short_repr

# GGUF's token types. Tokens of any other type are text.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
_ROLE_KEY = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def special_token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of the token for a role: "bos", "eos", "unknown", "padding".

    None if the file names none, and, with a warning, if the id is outside the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    if not file.has(key):
        return None
    token_id, tokens = file.integer(key), file.strings("tokenizer.ggml.tokens")
    if 0 <= token_id < len(tokens):
        return token_id
    _warn(
        f"{file.path} gives {token_id} as its {role} token, but has only {len(tokens)} tokens: the "
        f"model is loaded without a {role} token"
    )
    return None


def special_token(file: GgufFile, role: str) -> str | None:
    """Return the text of the token that `special_token_id` returns."""
    token_id = special_token_id(file, role)
    return None if token_id is None else Vocabulary.read(file).tokens[token_id]


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    file: GgufFile
    tokens: list[str]  # texts by id, all different
    types: list[int]  # GGUF token types by id

    @classmethod
    def read(cls, file: GgufFile) -> Self:
        """Read a file's vocabulary; warn of missing types and equal tokens. Raises BadModelFile."""
        tokens = file.strings("tokenizer.ggml.tokens")
        types = _token_types(file, tokens)
        if len(types) != len(tokens):
            raise BadModelFile(
                f"{file.path} has {len(tokens)} tokens and {len(types)} token types; fetch it again"
            )
        return cls(file, *_without_duplicates(file, tokens, types))

    @cached_property
    def id_by_token(self) -> Mapping[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def tokens_of_type(self, *types: int) -> list[str]:
        """Return the texts of all tokens of these types, in order of their ids."""
        pairs = zip(self.tokens, self.types, strict=True)
        return [token for token, token_type in pairs if token_type in types]

    def scores(self) -> list[float]:
        """Return SentencePiece's score of each token, by id; BPE merges the highest first."""
        scores = self.file.numbers("tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            raise BadModelFile(
                f"{self.file.path} has {len(self.tokens)} tokens and {len(scores)} scores; fetch "
                "it again"
            )
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of texts that BPE merges, in order of priority."""
        merges = []
        for merge in self.file.strings("tokenizer.ggml.merges"):
            left, space, right = merge.partition(" ")
            if not space:
                raise BadModelFile(
                    f"{self.file.path} has a malformed merge {merge!r}; fetch it again"
                )
            merges.append((left, right))
        return merges

    def build_bpe(self, merges: Collection[tuple[str, str]], **options: Any) -> BPE:
        """Build a BPE model. Raises BadModelFile for merges of texts that are not tokens."""
        # The library raises bare Exception for every fault.
        try:
            return BPE(vocab=dict(self.id_by_token), merges=list(merges), **options)
        except Exception as error:
            raise BadModelFile(
                f"{self.file.path} has merges that do not fit its tokens ({error}); fetch it again"
            ) from error


def _token_types(file: GgufFile, tokens: Sequence[str]) -> list[int]:
    """Return each token's type. In a file without types, tokens with a role are control tokens."""
    key = "tokenizer.ggml.token_type"
    if file.has(key):
        return file.integers(key)
    _warn(
        f"{file.path} does not mark its control tokens ({key}): only those with a role, such as "
        "eos, are treated as control tokens; use a newer file of the model"
    )
    types = [BYTE if _BYTE_TOKEN.fullmatch(token) else NORMAL for token in tokens]
    for role, token_id in _id_by_role(file, tokens).items():
        types[token_id] = UNKNOWN if role == "unknown" else CONTROL
    return types


def _id_by_role(file: GgufFile, tokens: Sequence[str]) -> dict[str, int]:
    """Return the token ids that the file names for roles, if they are in the vocabulary."""
    matches = filter(None, map(_ROLE_KEY.fullmatch, file.metadata))
    ids = {match[1]: file.integer(match[0]) for match in matches}
    return {role: token_id for role, token_id in ids.items() if 0 <= token_id < len(tokens)}


def _without_duplicates(
    file: GgufFile, tokens: list[str], types: list[int]
) -> tuple[list[str], list[int]]:
    """Return tokens and types, with tokens of duplicate text made unique control tokens.

    The token with a role keeps its text, or else the last, which llama.cpp finds.
    """
    id_by_text = {token: token_id for token_id, token in enumerate(tokens)}
    id_by_text |= {tokens[token_id]: token_id for token_id in _id_by_role(file, tokens).values()}
    if len(id_by_text) == len(tokens):
        return tokens, types
    tokens, types = list(tokens), list(types)
    duplicate_ids = [i for i, token in enumerate(tokens) if id_by_text[token] != i]
    _warn(
        f"{file.path} has {len(duplicate_ids)} tokens with the same text as another "
        f"({short_repr(duplicate_ids)}): no text is encoded to these"
    )
    for token_id in duplicate_ids:
        tokens[token_id], types[token_id] = f"<duplicate token {token_id}>", CONTROL
    return tokens, types
