"""The jinja sandbox for chat templates, which come with a model and are not trusted.

A template has no access to Python objects, and its time and memory are bounded. This module is
imported only when a template is rendered, since importing jinja2 takes a while.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from inspect import signature
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvkeep.models.text.template_limits import (
    RenderingBudget,
    bounded_json,
    check_format,
    check_operation,
    check_repetition,
    checked_text,
)
from kvkeep.models.text.template_texts import TemplateTexts

_MACRO_COST = 10  # iterations that a macro call counts as
# Internal filters, under names that a template cannot write.
_COUNT_FILTER, _JOIN_FILTER, _SEARCH_FILTER = "count rounds", "join parts", "search items"
_REFUSED_FILTERS = ("wordwrap", "urlize", "xmlattr", "pprint", "striptags")  # hard to bound
# They make bytes, whose size is not counted, or are hard to bound.
_REFUSED_METHODS = frozenset(("encode", "to_bytes", "translate", "striptags"))


def compile_template(texts: TemplateTexts, message_count: int) -> Template:
    """Return a template for one rendering; its code is compiled once. Raises TemplateSyntaxError.

    The texts are converted as they are compiled.
    """
    sandbox = _Sandbox(texts.convert, RenderingBudget(message_count))
    if texts.compiled is None:
        texts.compiled = sandbox.compile(texts.source)
    return Template.from_code(sandbox, texts.compiled, sandbox.make_globals(None))


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

    def __init__(self, convert: Callable[[str], str], budget: RenderingBudget) -> None:
        # transformers renders templates with block trimming. Not optimized: constant expressions
        # would be evaluated at compile time, where sizes are not checked.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=checked_text,
            extensions=[loopcontrols, GenerationBlock],
        )
        self._budget, self._convert = budget, convert
        for name in _REFUSED_FILTERS:
            self.filters.pop(name)
        self.filters = {
            name: self._checked(name, function) for name, function in self.filters.items()
        }
        self.filters |= {"tojson": self._to_json, _COUNT_FILTER: self._budget.count_iterations}
        self.filters |= {_JOIN_FILTER: self._join, _SEARCH_FILTER: self._budget.count_searched}
        self.tests["in"] = lambda value, items: value in budget.count_searched(items)
        self.globals.pop("lipsum")
        self.globals["range"] = lambda *bounds: budget.count_range(range(*bounds))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_refused = isinstance(obj, (str, int)) and attr in _REFUSED_METHODS
        return not is_refused and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(subject := getattr(method, "__self__", None), (str, int)):
            args = tuple(_listed(value) for value in args)
            __self._check_operation(__obj.__name__, subject, [*args, *kwargs.values()])
        elif isinstance(subject, (list, tuple, range)):
            __self._budget.count_searched(subject)
        return __self._budget.count_created(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            check_repetition(left, right)
        elif operator == "**" and max(abs(left), abs(right)) > 1000:
            raise TemplateRuntimeError("it uses too large an exponent")
        elif operator == "%" and isinstance(left, str):
            check_format(left, right)
        return self._budget.count_created(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the parts of the output, of a macro or of a block."""
        return self._budget.join(parts)

    def _join(self, *parts: object) -> str:
        """Evaluate `a ~ b ~ ...`: jinja's own concatenation would check no size."""
        return self._budget.join(parts)

    def _check_operation(self, name: str, subject: Any, arguments: list[Any]) -> None:
        self._budget.count_operation(name, subject, arguments)
        check_operation(name, subject, arguments)

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a jinja filter with checks of its arguments and its result."""

        @wraps(function)  # copies the attributes that tell jinja which arguments to pass
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            index = 1 if hasattr(function, "jinja_pass_arg") else 0
            if kwargs:  # put in the order of the parameters
                bound = signature(function).bind(*args, **kwargs)
                args, kwargs = bound.args, bound.kwargs
            if name in ("join", "sum"):
                args = (*args[:index], _listed(args[index]), *args[index + 1 :])
            self._check_operation(name, args[index], [*args[index + 1 :], *kwargs.values()])
            return self._budget.count_created(function(*args, **kwargs))

        return wrapper

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> Any:
        """Serialise as plain JSON, with transformers' arguments; jinja's escapes for HTML."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if (isinstance(indent, int) and indent > 100) or len(str(indent)) > 100:
            raise TemplateRuntimeError("it uses too wide an indentation")
        return self._budget.count_created(bounded_json(value, encoder))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _TextTransformer(self._convert).visit(tree)
        _CountingTransformer().visit(tree)
        tree.set_environment(self)
        return tree


class _TextTransformer(NodeTransformer):
    """Converts the texts that the template writes or compares with; not the names of fields."""

    def __init__(self, convert: Callable[[str], str]):
        self._convert = convert

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        node.data = self._convert(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, str):
            node.value = self._convert(node.value)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self.visit(node.arg)
        return node


class _CountingTransformer(NodeTransformer):
    """Inserts counting into loops, macros and comparisons, and size checks into concatenations."""

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

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _filter_node(_SEARCH_FILTER, [node.expr], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter_node(_JOIN_FILTER, node.nodes, node)


def _counting_call(iterations: int, parent: nodes.Node) -> nodes.Expr:
    """Return an expression that counts iterations. parent: the node that it is put into."""
    return _filter_node(_COUNT_FILTER, [nodes.Const(iterations, lineno=parent.lineno)], parent)


def _filter_node(name: str, operands: list[nodes.Expr], parent: nodes.Node) -> nodes.Expr:
    """Return the expression that passes the operands to the filter `name`, in `parent`'s line."""
    return nodes.Filter(operands[0], name, operands[1:], [], None, None, lineno=parent.lineno)


def _listed(value: Any) -> Any:
    """Return the items of an iterator as a list, so that they can be measured."""
    return list(value) if hasattr(value, "__next__") else value


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(message)
