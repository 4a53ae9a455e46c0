"""The jinja sandbox for chat templates, which come with a model and are not trusted.

A template has no access to Python objects, and its time and memory are bounded. This module is
imported only when a template is rendered, since importing jinja2 takes a while.
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

MAX_ITERATIONS = 300_000  # of all loops together, numbers in ranges included
_MACRO_COST = 10  # iterations that a macro call counts as
# Internal filters, under names that a template cannot write.
_COUNT_FILTER, _JOIN_FILTER = "count rounds", "join parts"
MAX_SIZE = 50_000_000  # characters or items of a value in a template; also the largest number


def compile_template(source: str) -> Template:
    """Compile a template for one rendering. Raises TemplateSyntaxError."""
    return _Sandbox().from_string(source)


class GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks text to train on: rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=lineno)]  # variables set in the block end with it


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that bounds iterations, counted by a call in each loop, and the size of values."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # transformers renders templates with block trimming. Not optimized: constant expressions
        # would be evaluated at compile time, where sizes are not checked.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, GenerationBlock],
        )
        self._iterations = 0
        self.filters = {name: _with_checks(function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _to_json, _COUNT_FILTER: self._count, _JOIN_FILTER: _join}
        self.globals.pop("lipsum")
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_integers(*args, *kwargs.values())
        return _check_size(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_repetition(left, right)
        elif operator == "**" and max(abs(left), abs(right)) > 1000:
            raise TemplateRuntimeError("it uses too large an exponent")
        elif operator == "%" and isinstance(left, str) and len(left) > 1000:
            raise TemplateRuntimeError("its format string makes too long a text")
        return _check_size(super().call_binop(context, operator, left, right))

    def _count(self, iterations: int) -> bool:
        self._iterations += iterations
        if self._iterations > MAX_ITERATIONS:
            raise TemplateRuntimeError(f"it loops more than {MAX_ITERATIONS:,} times")
        return True  # a loop's condition continues with `and`

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        is_small = max(numbers.start, numbers.stop) < MAX_SIZE  # `len` raises for a huge range
        self._count(len(numbers) if is_small else MAX_SIZE)
        return numbers

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _CountingTransformer().visit(tree)
        tree.set_environment(self)
        return tree


class _CountingTransformer(NodeTransformer):
    """Inserts counting into loops and macros, and a size check into concatenation."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # Iterations that a loop's condition skips count as well.
        if node.test is not None:
            node.test = nodes.And(_counting_call(1, node), node.test, lineno=node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(_counting_call(1, node), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_counting_call(_MACRO_COST, node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter_node(_JOIN_FILTER, node.nodes, node)


def _counting_call(iterations: int, parent: nodes.Node) -> nodes.Expr:
    """Return an expression that calls `_Sandbox._count`. parent: the node that it is put into."""
    return _filter_node(_COUNT_FILTER, [nodes.Const(iterations, lineno=parent.lineno)], parent)


def _filter_node(name: str, operands: list[nodes.Expr], parent: nodes.Node) -> nodes.Expr:
    """Return the expression that passes the operands to the filter `name`, in `parent`'s line."""
    return nodes.Filter(operands[0], name, operands[1:], [], None, None, lineno=parent.lineno)


def _join(*parts: object) -> Any:
    """Evaluate `a ~ b ~ ...`: jinja's own concatenation would check no size."""
    return _check_size("".join(map(str, parts)))


def _with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a jinja filter with checks of its arguments and its result."""

    @wraps(function)  # copies the attributes that tell jinja which arguments to pass
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_integers(*args, *kwargs.values())
        return _check_size(function(*args, **kwargs))

    return wrapper


def _check_integers(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_SIZE for value in values):
        raise TemplateRuntimeError("it uses too large a number")


def _check_repetition(left: Any, right: Any) -> None:
    for sequence, factor in ((left, right), (right, left)):
        is_repetition = isinstance(sequence, Sized) and isinstance(factor, int)
        if is_repetition and len(sequence) * abs(factor) > MAX_SIZE:
            raise TemplateRuntimeError("it repeats a value too often")


def _check_size(value: Any) -> Any:
    """Return the value. Raises TemplateRuntimeError if it is too large."""
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_SIZE:
        raise TemplateRuntimeError("it creates too large a value")
    if isinstance(value, int) and value.bit_length() > 4096:
        raise TemplateRuntimeError("it creates too large a number")
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise as plain JSON, with transformers' arguments; jinja's filter escapes for HTML."""
    _check_integers(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(message)
