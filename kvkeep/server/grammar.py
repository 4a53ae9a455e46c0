"""Constrained decoding by a JSON schema or a grammar, with llguidance's token masks."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from tokenizers import Tokenizer
from torch import Tensor

from kvkeep.chat.schema_references import map_parts
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.limits import MAX_GRAMMAR_RULES, MAX_SCHEMA_CHARACTERS
from kvkeep.server.resolved_schemas import prepared_schema
from kvkeep.server.schema_patterns import without_unsupported_patterns

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SUBSTITUTE_EOS = "<|kvkeep stands in for the end of the text|>"


def compile_grammar(
    model: Model, schema: Mapping[str, Any] | None, gbnf: str | None
) -> "Grammar | None":
    """Compile a JSON schema or a GBNF grammar; None without them. Raises InvalidArgument."""
    if schema is not None and gbnf:
        raise InvalidArgument("a grammar cannot be combined with a schema or a required tool call")
    if schema is not None:
        return Grammar.from_schema(model, schema)
    return Grammar.from_gbnf(model, gbnf) if gbnf else None


class Grammar:
    """A sampling `Constraint`: the output is one text of a grammar, then an end token if any."""

    def __init__(self, model: Model, grammar: str):
        """grammar: in llguidance's own form. Raises InvalidArgument for an invalid one.

        Its `warnings` name what of a schema is not followed; `schema` is that which is, if any.
        """
        # Model files may name end tokens that the tokenizer's vocabulary lacks.
        eos_ids = tuple(eos for eos in model.end_token_ids if eos < model.text.vocab_size)
        tokenizer = _llguidance_tokenizer(model.text, eos_ids)
        self._tokenizer = tokenizer
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if problem := self._matcher.get_error():
            reason = _first_reason(problem)
            raise InvalidArgument(f"the schema or grammar is not supported: {reason}")
        self.schema: Mapping[str, Any] | None = None
        self.warnings = tuple(
            f"a part of the schema is not followed: {_first_reason(problem)}"
            for problem in self._matcher.get_grammar_warnings()
        )
        self._bitmask = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._substitute_eos_id = None if eos_ids else int(tokenizer.eos_token)

    def copy(self) -> "Grammar":
        """Return the same grammar in its present state, for another generation."""
        result = copy(self)
        result._matcher, result._bitmask = self._matcher.deep_copy(), self._bitmask.copy()
        return result

    @classmethod
    def from_schema(cls, model: Model, schema: Mapping[str, Any]) -> "Grammar":
        """Compile a JSON schema, with its objects closed. Raises InvalidArgument."""
        return cls.from_prepared(model, prepared_schema(schema))

    @classmethod
    def from_prepared(cls, model: Model, schema: Mapping[str, Any]) -> "Grammar":
        """Compile a schema that `prepared_schema` returned, or one of such. Raises likewise."""
        schema_json = json.dumps(schema)
        _require_short("a schema", schema_json)
        try:
            grammar = cls(model, _json_grammar(schema_json))
            grammar.schema = schema
            return grammar
        except InvalidArgument:
            reduced_schema, patterns = without_unsupported_patterns(schema)
            if not patterns:
                raise
        grammar = cls(model, _json_grammar(json.dumps(reduced_schema)))
        dropped = (f"the pattern {pattern!r} is not followed" for pattern in patterns)
        grammar.schema, grammar.warnings = reduced_schema, (*grammar.warnings, *dropped)
        return grammar

    @classmethod
    def from_gbnf(cls, model: Model, gbnf: str) -> "Grammar":
        """Compile a GBNF grammar, llama.cpp's form. Raises InvalidArgument for an invalid one."""
        _require_short("a grammar", gbnf)
        if (num_rules := gbnf.count("::=")) > MAX_GRAMMAR_RULES:
            raise InvalidArgument(
                f"a grammar can have at most {MAX_GRAMMAR_RULES:,} rules; found {num_rules:,}"
            )
        try:
            grammar = LLMatcher.grammar_from_lark(gbnf_to_lark(gbnf))
        except Exception as error:  # the library raises its own types
            reason = _first_reason(str(error))
            raise InvalidArgument(f"the grammar is not supported: {reason}") from error
        return cls(model, grammar)

    @classmethod
    def from_lark(cls, model: Model, rules: str) -> "Grammar":
        """Compile a grammar in llguidance's variant of Lark. Raises InvalidArgument."""
        _require_short("a grammar", rules)
        return cls(model, LLMatcher.grammar_from_lark(rules))

    def allows(self, tokens: list[int]) -> bool:
        """Whether the text can go on with these tokens."""
        return bool(self._matcher.validate_tokens(tokens) == len(tokens))

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits `[vocab]` with -inf for tokens not allowed next. Raises InvalidArgument."""
        self._matcher.unsafe_compute_mask_ptr(self._bitmask.ctypes.data, self._bitmask.nbytes)
        if problem := self._matcher.get_error():
            reason = _first_reason(problem)
            raise InvalidArgument(f"the schema or grammar cannot be followed: {reason}")
        bits = np.unpackbits(self._bitmask.view(np.uint8), bitorder="little").view(bool)
        if self._substitute_eos_id is not None:
            bits[self._substitute_eos_id] = False
            if not bits[: len(logits)].any():
                raise InvalidArgument(
                    "the schema or grammar allows only the empty text, and the model has no end "
                    "token: leave the schema or grammar out, or use one that allows text"
                )
        # Logits and tokenizer may differ in size. In numpy, as sampling is.
        masked = np.full(len(logits), -np.inf, dtype=np.float32)
        np.copyto(masked[: len(bits)], logits.numpy()[: len(bits)], where=bits[: len(logits)])
        return torch.from_numpy(masked)

    @property
    def complete(self) -> bool:
        """Whether no more tokens may come, and the model has no end token to sample."""
        return self._substitute_eos_id is not None and bool(self._matcher.is_stopped())

    @property
    def is_whole(self) -> bool:
        """Whether the text so far is a text of the grammar."""
        return bool(self._matcher.is_accepting() or self._matcher.is_stopped())

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Append tokens. Returns False if the text cannot go on with them; then it is of no use."""
        return bool(self._matcher.try_consume_tokens(list(tokens)) == len(tokens))

    def follow_text(self, text: str) -> bool:
        """Append a text, in any tokens that have it; see `follow`."""
        return self.follow(self._tokenizer.greedy_tokenize(text))


def _json_grammar(schema_json: str) -> str:
    """Return the grammar of a JSON schema; keywords that the library lacks are left out.

    Without flexible white space, which small models would write endlessly.
    """
    try:
        return LLMatcher.grammar_from_json_schema(
            schema_json, defaults={"whitespace_flexible": False, "lenient": True}
        )
    except Exception as error:  # the library raises its own types
        reason = _first_reason(str(error))
        raise InvalidArgument(f"the schema is not supported: {reason}") from error


def _require_short(what: str, text: str) -> None:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise InvalidArgument(
            f"{what} can have at most {MAX_SCHEMA_CHARACTERS:,} characters; found {len(text):,}"
        )


def _first_reason(problem: str) -> str:
    """Return the reason in a message of the library, without its dump of state and position."""
    lines = [line.strip() for line in problem.partition("<state>")[0].splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines or ["no reason was given"])[0][:200]


def moved_schema(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a schema as a part of another, at the JSON pointer `place`, with its `$ref`s moved."""
    result = map_parts(schema, lambda part: moved_schema(part, place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = place + reference.removeprefix("#")
    return result


@lru_cache(maxsize=4)
def _llguidance_tokenizer(codec: TextCodec, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Return llguidance's tokenizer. It needs an end token: one is added if `eos_ids` is empty."""
    tokenizer_json = codec.tokenizer.to_str()
    if eos_ids:
        return LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.add_special_tokens([_SUBSTITUTE_EOS])
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(_SUBSTITUTE_EOS))
