"""The tokens in a GGUF file: their texts, kinds, scores and merges, checked against each other."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from tokenizers.models import BPE

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf_file import GgufFile, shown

# What a token is, as GGUF numbers it. All others are of text.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6


@dataclass(frozen=True)
class Vocabulary:
    """tokens: their texts by id. types: what each is."""

    file: GgufFile
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, file: GgufFile) -> Self:
        """Raises BadModelFile where tokens or types are missing, are no match, or come twice."""
        tokens = file.texts("tokenizer.ggml.tokens")
        types = file.numbers("tokenizer.ggml.token_type")
        if len(types) != len(tokens):
            raise BadModelFile(
                f"{file.path} has {len(tokens)} tokens and {len(types)} token types; fetch it again"
            )
        vocabulary = cls(file, tokens, types)
        if len(vocabulary.ids) != len(tokens):
            raise BadModelFile(
                f"{file.path} has {len(tokens) - len(vocabulary.ids)} tokens whose text another "
                "one has; fetch it again"
            )
        return vocabulary

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
        key = "tokenizer.ggml.scores"
        scores = self.file.required(key)
        if not isinstance(scores, list) or not all(_is_number(score) for score in scores):
            raise BadModelFile(
                f"{self.file.path}: metadata field {key} must be a list of numbers, found "
                f"{shown(scores)}; fetch it again"
            )
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


def _is_number(score: object) -> bool:
    """Of two scores one must be the greater, so NaN is none."""
    return type(score) in (int, float) and score == score
