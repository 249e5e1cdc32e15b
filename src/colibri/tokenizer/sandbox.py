"""The jinja2 environment in which chat templates run: what they may see, and what a rendering may cost.

The language is the one transformers gives to templates (trim_blocks, lstrip_blocks, loop controls, the `generation`
tag, `tojson` as json.dumps writes it, `raise_exception`, `strftime_now`, `namespace`). Left out are the parts that
reach outside (include, import, extends), the text generator `lipsum`, and the filters in
`growth_guards.REMOVED_FILTERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from colibri.tokenizer.growth_guards import (
    REMOVED_FILTERS,
    check_format_spec,
    check_operator,
    check_string_method,
    guarded_filter,
)
from colibri.tokenizer.render_budget import LimitExceeded, current_budget

LONGEST_SOURCE = 256 << 10
LONGEST_DATE_FORMAT = 1000


class TemplateRefusal(jinja2.TemplateError):
    """`raise_exception` was called: the message is the template's own."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an answer for training; here it only scopes its variables."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    @staticmethod
    def render_body(caller: Callable[[], str]) -> str:
        return caller()


class TemplateNamespace(Namespace):
    """A namespace without underscore attributes, whose text does not show what it holds.

    Namespaces can be linked after they were made, so printing their contents could be endless.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        # The signature of jinja2's own class, so that `namespace(self=...)` works.
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the namespace attribute {name!r} begins with an underscore")


class TemplateDict:
    """The `dict` of templates: it makes dictionaries and gives no access to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _LimitedFormatter(SandboxedFormatter):
    """`str.format` with bounded widths and a bounded sum of its fields."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_format_spec(format_spec)
        text = super().format_field(value, format_spec)
        self._size += len(text)
        current_budget().require_text(self._size)
        return text


class _CountingCodeGenerator(CodeGenerator):
    """Sends every container, slice and concatenation that a template writes through the budget."""

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._charged(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: Frame) -> None:
        self._charged(super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:
        self._charged(super().visit_Dict, node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._charged(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_values((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def _charged(self, visit: Callable[[Any, Frame], None], node: jinja2.nodes.Expr, frame: Frame) -> None:
        self.write("environment.charge(")
        visit(node, frame)
        self.write(")")


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a rendering also has a budget (`render_budget.spending` must be active)."""

    code_generator_class = _CountingCodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
            # Folding constants would run operators while compiling.
            optimized=False,
        )
        self.filters["tojson"] = _to_json
        self.filters = {
            name: guarded_filter(name, function)
            for name, function in self.filters.items()
            if name not in REMOVED_FILTERS
        }
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _format_now
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        if len(source) > LONGEST_SOURCE:
            raise LimitExceeded(f"it has more than {LONGEST_SOURCE} characters")
        tree = super()._parse(source, name, filename)
        outside = (
            jinja2.nodes.Include,
            jinja2.nodes.Import,
            jinja2.nodes.FromImport,
            jinja2.nodes.Extends,
        )
        for node in tree.find_all(outside):
            raise jinja2.TemplateSyntaxError("include, import and extends are not available", node.lineno)
        for loop in tree.find_all(jinja2.nodes.For):
            counter = jinja2.nodes.EnvironmentAttribute("count_iteration")
            call = jinja2.nodes.Call(counter, [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(call).set_lineno(loop.lineno, override=True))
        tree.set_environment(self)
        return tree

    def count_iteration(self) -> None:
        """Called at the top of every loop body; `call` does the counting."""

    def charge(self, value: Any) -> Any:
        """Charge a container or text that the template wrote."""
        return current_budget().charge(value)

    def join_values(self, values: Iterable[Any]) -> str:
        """The operator `~`."""
        return current_budget().join(str(value) for value in values)

    def concat(self, parts: Iterable[str]) -> str:
        """Called by jinja2 for the text of macros, blocks and `set` blocks."""
        return current_budget().join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget()
        budget.step()
        check_operator(budget, operator, left, right)
        return budget.charge(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = check_string_method(budget, owner, __obj.__name__, args)
        result = super().call(__context, __obj, *args, **kwargs)
        # What a mapping gives back is part of it, not new.
        return result if isinstance(owner, Mapping) else budget.charge(result)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (bytes, bytearray)) or attr == "to_bytes":
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # jinja2 would print nothing for the attribute itself and fail only one step later.
        if attribute.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"access to the attribute {attribute!r} is refused")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        if not isinstance(text, str) or hasattr(text, "__html__"):
            raise LimitExceeded("format is not available on escaped text")

        if value.__name__ == "format_map":
            return lambda mapping: _LimitedFormatter(self).vformat(text, (), mapping)
        return lambda *args, **kwargs: _LimitedFormatter(self).vformat(text, args, kwargs)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _format_now(format: str) -> str:
    if len(format) > LONGEST_DATE_FORMAT:
        raise LimitExceeded("the date format is too long")
    return datetime.now().strftime(format)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`x` as json.dumps writes it, made piece by piece so that it can be stopped."""
    budget = current_budget()
    if isinstance(indent, int):
        budget.require_text(indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    text = budget.join(encoder.iterencode(x))
    for character in budget.verbatim:
        text = text.replace(json.dumps(character)[1:-1], character)
    return text
