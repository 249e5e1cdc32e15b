"""Chat templates: the text a conversation becomes, exactly as transformers renders it, in a limited sandbox."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.nodes

from colibri.errors import TemplateError
from colibri.tokenizer.render_budget import LimitExceeded, RenderBudget, expanded_size, spending
from colibri.tokenizer.sandbox import ChatTemplateEnvironment, TemplateRefusal

_SIZE_COUNTED = 1 << 40


class ChatTemplate:
    """One compiled chat template.

    Raises TemplateError when the source cannot be compiled or asks for something that is not available.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._environment = ChatTemplateEnvironment()
        with spending(RenderBudget()):
            try:
                self._template = self._environment.from_string(source)
            except (Exception, RecursionError) as error:
                raise TemplateError(f"the chat template cannot be compiled: {_describe(error)}") from error

    def render(self, variables: Mapping[str, Any], verbatim: str = "") -> str:
        """The text for `variables`, which must be plain JSON data.

        The characters in `verbatim` are never escaped by the `tojson` filter.
        Raises TemplateError with the template's own message when it calls `raise_exception`, and with the reason when
        it fails or goes over its limits.
        """
        budget = RenderBudget(expanded_size(variables, _SIZE_COUNTED), verbatim)
        with spending(budget):
            try:
                return budget.join(self._template.generate(**variables))
            except TemplateRefusal as refusal:
                raise TemplateError(refusal.message or "the chat template refused the messages") from refusal
            except (Exception, RecursionError) as error:
                raise TemplateError(f"the chat template failed: {_describe(error)}") from error

    @functools.cached_property
    def literal_text(self) -> str:
        """Everything the template writes as itself: its text and string constants, separated by null characters."""
        tree = self._environment.parse(self.source)
        texts = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
        return "\0".join(texts)


def _describe(error: BaseException) -> str:
    if isinstance(error, LimitExceeded):
        return str(error)
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} (line {error.lineno})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply or calls itself without end"
    lines = str(error).splitlines()
    return lines[0] if isinstance(error, jinja2.TemplateError) and lines else f"{type(error).__name__}: {error}"
