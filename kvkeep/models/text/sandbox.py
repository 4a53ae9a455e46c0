"""Where chat templates run: they come with a model, so they reach nothing and end in bounded time.

Imported only when a template is rendered, since jinja2 takes a while to import.
"""

import json
from collections.abc import Callable, Sized
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_ROUNDS = 300_000  # of all loops together, numbers of ranges included
_MACRO = 10  # rounds that the call of a macro counts for
_ROUNDS, _JOINED = "count rounds", "join parts"  # no names that a template could call
LARGEST = 50_000_000  # characters or items of what a template makes; no number is larger


def compiled(source: str) -> Template:
    """A template that is to be rendered once. Raises TemplateSyntaxError."""
    return _Sandbox().from_string(source)


class GenerationBlock(Extension):
    """`{% generation %}` marks what to train on; to render it is just what is in it."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]  # what is set in it ends with it


class _Sandbox(ImmutableSandboxedEnvironment):
    """Counts the rounds of loops and macros, and refuses what grows without end.

    Whatever repeats asks `_another` first: that is written into the parsed template, as a filter.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Block trimming is what templates for transformers are written for. Unoptimized: constants
        # are computed where they are bounded, too.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, GenerationBlock],
        )
        self._rounds = 0
        self.filters = {name: _bounded(each) for name, each in self.filters.items()}
        self.filters |= {"tojson": _to_json, _ROUNDS: self._another, _JOINED: _joined}
        self.globals.pop("lipsum")
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _require_small(args, kwargs)
        return _within(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _require_product(left, right)
        elif operator == "**" and max(abs(left), abs(right)) > 1000:
            raise TemplateRuntimeError("it raises numbers to too high a power")
        elif operator == "%" and isinstance(left, str) and len(left) > 1000:
            raise TemplateRuntimeError("it formats by too long a text")
        return _within(super().call_binop(context, operator, left, right))

    def _another(self, count: int) -> bool:
        self._rounds += count
        if self._rounds > MOST_ROUNDS:
            raise TemplateRuntimeError(f"it goes round more than {MOST_ROUNDS:,} times")
        return True

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._another(len(numbers) if numbers.stop < LARGEST > numbers.start else LARGEST)
        return numbers

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        _Counting().visit(parsed)
        parsed.set_environment(self)
        return parsed


class _Counting(NodeTransformer):
    """Has whatever repeats counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # Where a loop has a condition, rounds that it leaves out count, too.
        if node.test is not None:
            node.test = nodes.And(_counted(1, node), node.test, lineno=node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(_counted(1, node), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_counted(_MACRO, node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_JOINED, node.nodes, node)


def _counted(rounds: int, at: nodes.Node) -> nodes.Expr:
    return _filter(_ROUNDS, [nodes.Const(rounds, lineno=at.lineno)], at)


def _filter(name: str, given: list[nodes.Expr], at: nodes.Node) -> nodes.Expr:
    return nodes.Filter(given[0], name, given[1:], [], None, None, lineno=at.lineno)


def _joined(*parts: object) -> str:
    """`a ~ b`."""
    text = "".join(map(str, parts))
    _within(text)
    return text


def _bounded(filtering: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filtering)  # with the marks by which jinja knows what to call it with
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _require_small(args, kwargs)
        return _within(filtering(*args, **kwargs))

    return bounded


def _require_small(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > LARGEST:
            raise TemplateRuntimeError("it asks for something too large")


def _require_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        size = len(one) if isinstance(one, Sized) else 1
        if isinstance(other, int) and size * abs(other) > LARGEST and isinstance(one, Sized):
            raise TemplateRuntimeError("it repeats something too often")


def _within(made: Any) -> Any:
    if isinstance(made, (str, list, tuple)) and len(made) > LARGEST:
        raise TemplateRuntimeError("it makes something too large")
    if isinstance(made, int) and made.bit_length() > 4096:
        raise TemplateRuntimeError("it makes too large a number")
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes it for HTML. The arguments are transformers'."""
    _require_small((indent,), {})
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateRuntimeError(message)
