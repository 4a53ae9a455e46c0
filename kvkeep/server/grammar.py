"""What an answer must look like: JSON of a schema, or a grammar; llguidance knows what may come."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from torch import Tensor

from kvkeep.errors import InvalidArgument
from kvkeep.model import Model

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_LARGEST = 200_000  # characters of a schema


class Grammar:
    """A `Constraint` that is one text of a grammar, and then the end of the text."""

    def __init__(self, model: Model, grammar: str):
        """grammar: in llguidance's own form. Raises InvalidArgument for one that is none."""
        tokenizer = _tokenizer(model)
        if problem := LLMatcher.validate_grammar(grammar, tokenizer):
            raise InvalidArgument(f"the schema or grammar cannot be used: {problem[:500]}")
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._mask = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)

    @classmethod
    def of_schema(cls, model: Model, schema: Mapping[str, Any]) -> "Grammar":
        """Of a JSON schema. Raises InvalidArgument for one that cannot be used."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"the schema is not JSON: {error}") from error
        if len(text) > _LARGEST:
            raise InvalidArgument(f"a schema has at most {_LARGEST:,} characters")
        try:
            # Without white space: small models would write it for ever.
            grammar = LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_flexible": False}
            )
        except Exception as error:  # the library's own kinds
            raise InvalidArgument(f"the schema cannot be used: {str(error)[:500]}") from error
        return cls(model, grammar)

    @classmethod
    def of_gbnf(cls, model: Model, text: str) -> "Grammar":
        """Of a grammar as llama.cpp's clients write it. Raises InvalidArgument for none."""
        if len(text) > _LARGEST:
            raise InvalidArgument(f"a grammar has at most {_LARGEST:,} characters")
        try:
            grammar = LLMatcher.grammar_from_lark(gbnf_to_lark(text))
        except Exception as error:  # the library's own kinds
            raise InvalidArgument(f"the grammar cannot be used: {str(error)[:500]}") from error
        return cls(model, grammar)

    def masked(self, logits: Tensor) -> Tensor:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if problem := self._matcher.get_error():
            raise InvalidArgument(f"the schema or grammar cannot be followed: {problem[:500]}")
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        allowed = np.zeros(logits.shape[0], dtype=bool)
        allowed[: len(bits)] = bits[: len(allowed)]
        return logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def token_bytes(model: Model, token: int) -> bytes:
    """What a token stands for, also where that is no whole character."""
    return bytes(_tokenizer(model).decode_bytes([token]))


def _tokenizer(model: Model) -> LLTokenizer:
    return _tokenizer_of(str(model.text.folder / "tokenizer.json"), model.spec.eos_token_ids)


@lru_cache(maxsize=4)
def _tokenizer_of(path: str, ends: tuple[int, ...]) -> LLTokenizer:
    return LLTokenizer(path, eos_token=list(ends))
