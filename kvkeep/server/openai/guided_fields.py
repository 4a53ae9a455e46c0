"""vLLM's fields for answers in a given form, as JSON schemas and grammars."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvkeep.errors import InvalidArgument
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.limits import MAX_FIELDS, Data, GrammarText, ShortText
from kvkeep.server.schemas import RequestBody

_Schema = Data | GrammarText  # as an object, or as its JSON text
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_Choices = Annotated[list[ShortText], Field(min_length=1, max_length=MAX_FIELDS)]


class StructuredOutputs(RequestBody):
    """The form of an answer; one of these. grammar: in GBNF."""

    json_schema: Annotated[_Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    choice: _Choices | None = None
    grammar: GrammarText | None = None
    regex: GrammarText | None = None
    structural_tag: Any = None

    def schema_and_grammar(self, names: str) -> tuple[Mapping[str, Any] | None, str | None]:
        """Return a JSON schema, or a grammar in GBNF; (None, None) if nothing is asked for.

        names: of the field, for errors. Raises InvalidArgument for a form that is not supported.
        """
        for name in ("regex", "structural_tag"):
            if getattr(self, name):
                raise InvalidArgument(
                    f"{names}{name} is not supported: send a JSON schema, choices or a grammar"
                )
        has_schema = self.json_schema is not None
        schema = _parsed(self.json_schema, names) if has_schema else None
        schema = ANY_OBJECT if self.json_object else schema
        grammar = _choice_grammar(self.choice) if self.choice else self.grammar
        forms = (has_schema, self.json_object, self.choice, self.grammar)
        if sum(map(bool, forms)) > 1:
            raise InvalidArgument(f"{names}* can ask for one form only")
        return schema, grammar


class GuidedFields(RequestBody):
    """The fields of requests: `structured_outputs`, and the older names of its parts."""

    guided_json: _Schema | None = None
    guided_choice: _Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_regex: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None

    def guided_form(self) -> tuple[Mapping[str, Any] | None, str | None]:
        """Return the JSON schema or the grammar of the answer; (None, None) for any answer."""
        fields = ("guided_json", "guided_choice", "guided_grammar", "guided_regex")
        older = {name.removeprefix("guided_"): getattr(self, name) for name in fields}
        options = StructuredOutputs.model_validate(older)
        forms = [options.schema_and_grammar("guided_")]
        if self.structured_outputs is not None:
            forms.append(self.structured_outputs.schema_and_grammar("structured_outputs."))
        forms = [form for form in forms if form != (None, None)]
        if len(forms) > 1:
            raise InvalidArgument("guided_* and structured_outputs exclude each other")
        return forms[0] if forms else (None, None)


def _parsed(schema: Any, names: str) -> Mapping[str, Any]:
    """Return a schema that may be JSON text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{names}json must be a JSON schema")
    return schema


def _choice_grammar(choices: list[str]) -> str:
    return f"root ::= {' | '.join(map(_literal, choices))}"


def _literal(text: str) -> str:
    """Return a text as a string of GBNF."""
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{_CONTROL_CHARACTER.sub(_hexadecimal, escaped)}"'


def _hexadecimal(character: re.Match[str]) -> str:
    return f"\\x{ord(character[0]):02x}"
