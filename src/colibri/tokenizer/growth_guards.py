"""Upper bounds for the filters, string methods and operators whose result can be far larger than their operands.

Each bound is computed before the operation runs. The others need none: their result is at most a constant times their
operands, and it is charged afterwards.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from colibri.tokenizer.render_budget import LimitExceeded, RenderBudget, current_budget, expanded_size

LARGEST_INTEGER_BITS = 4096
LARGEST_ROUND_PRECISION = 100
# rfind and its kin compare at every position, so a long pattern in a long text is quadratic.
LARGEST_REVERSE_SEARCH = 1_000_000_000

_LONG_NUMBER = re.compile(r"\d{4,}")

# Filters without a use in chat templates that cost quadratic time or are not deterministic.
REMOVED_FILTERS = frozenset({"pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"})


def _occurrences(text: str, part: str) -> int:
    return text.count(part) if part else len(text) + 1


def _check_replace(budget: RenderBudget, text: str, old: str, new: str) -> None:
    budget.require_text(len(text) + _occurrences(text, old) * len(new))


def check_printf(budget: RenderBudget, template: str, values: Any) -> None:
    """Refuse widths of four digits and more, widths taken from the values, and results that are too large."""
    if "*" in template or _LONG_NUMBER.search(template):
        raise LimitExceeded("a format has a width that is too large")
    uses = template.count("%") if isinstance(values, Mapping) else 1
    budget.require_text(len(template) + uses * expanded_size(values, budget.text_limit))


def check_format_spec(spec: str) -> None:
    """Refuse widths of four digits and more in the part of a `str.format` field after the colon."""
    if _LONG_NUMBER.search(spec):
        raise LimitExceeded("a format has a width that is too large")


def _guard_center(budget: RenderBudget, given: dict[str, Any]) -> None:
    budget.require_text(int(given.get("width", 80)))


def _guard_indent(budget: RenderBudget, given: dict[str, Any]) -> None:
    width = given.get("width", 4)
    text = str(given["s"])
    added = len(width) if isinstance(width, str) else int(width)
    budget.require_text(len(text) + (len(text.splitlines()) + 1) * added)


def _guard_replace(budget: RenderBudget, given: dict[str, Any]) -> None:
    _check_replace(budget, str(given["s"]), str(given["old"]), str(given["new"]))


def _guard_join(budget: RenderBudget, given: dict[str, Any]) -> None:
    values = given["value"]
    if not isinstance(values, (str, Mapping)):
        values = list(values)
        given["value"] = values
    size = expanded_size(values, budget.text_limit)
    budget.require_text(size + len(values) * len(str(given.get("d", ""))))


def _guard_count(name: str, budget: RenderBudget, given: dict[str, Any]) -> None:
    budget.require_text(int(given[name]))


def _guard_round(_budget: RenderBudget, given: dict[str, Any]) -> None:
    if abs(int(given.get("precision", 0))) > LARGEST_ROUND_PRECISION:
        raise LimitExceeded("round has a precision that is too large")


def _guard_format(budget: RenderBudget, given: dict[str, Any]) -> None:
    check_printf(budget, str(given["value"]), given.get("kwargs") or given.get("args", ()))


def _guard_sum(_budget: RenderBudget, given: dict[str, Any]) -> None:
    # Adding lists copies the growing sum for every item.
    if not isinstance(given.get("start", 0), (int, float)):
        raise LimitExceeded("sum may only add numbers")


_FILTER_GUARDS: dict[str, Callable[[RenderBudget, dict[str, Any]], None]] = {
    "batch": functools.partial(_guard_count, "linecount"),
    "center": _guard_center,
    "format": _guard_format,
    "indent": _guard_indent,
    "join": _guard_join,
    "replace": _guard_replace,
    "round": _guard_round,
    "slice": functools.partial(_guard_count, "slices"),
    "sum": _guard_sum,
}


def guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function` with its steps counted, its growth bounded and its result charged."""
    if hasattr(function, "jinja_async_variant"):
        # The dispatcher between the two variants takes a hidden first argument; the environment is never asynchronous.
        function = inspect.unwrap(function)
    guard = _FILTER_GUARDS.get(name)
    signature = inspect.signature(function) if guard else None

    # wraps also copies the mark that tells jinja2 to pass its context as the first argument.
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.step()
        if guard and signature:
            bound = signature.bind(*args, **kwargs)
            guard(budget, bound.arguments)
            args, kwargs = bound.args, bound.kwargs
        return budget.charge(function(*args, **kwargs))

    return counted


def check_string_method(budget: RenderBudget, text: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bound the result of `text.method(*args)`; gives the arguments to call it with."""
    if method in ("center", "ljust", "rjust", "zfill"):
        budget.require_text(int(args[0]))
    elif method == "expandtabs":
        budget.require_text(len(text) + text.count("\t") * (int(args[0]) if args else 8))
    elif method == "replace":
        _check_replace(budget, text, args[0], args[1])
    elif method == "join":
        values = list(args[0])
        budget.require_text(expanded_size(values, budget.text_limit) + len(values) * len(text))
        return (values,)
    elif method in ("rfind", "rindex", "rpartition", "rsplit") and args and isinstance(args[0], str):
        if len(text) * len(args[0]) > LARGEST_REVERSE_SEARCH:
            raise LimitExceeded("it searches for a text that is too long")
    elif method in ("encode", "maketrans", "translate"):
        raise LimitExceeded(f"the string method {method!r} is not available in chat templates")
    return args


def check_operator(budget: RenderBudget, operator: str, left: Any, right: Any) -> None:
    """Bound the result of `left operator right` for the operators `*`, `**`, `%` and `+`."""
    if operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _check_integer(left.bit_length() + right.bit_length())
        else:
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
                    budget.require_text(expanded_size(sequence, budget.text_limit) * max(count, 0))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_integer(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, (str, bytes)):
        check_printf(budget, left if isinstance(left, str) else left.decode("latin-1"), right)


def _check_integer(bits: int) -> None:
    if bits > LARGEST_INTEGER_BITS:
        raise LimitExceeded("a number is too large")
