"""Which format each weight gets: the choices behind `--weights`."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.errors import UsageError
from colibri.families import Role, Source
from colibri.quantize import default_layout

# Small and sensitive: a wrong expert is worse than a slightly wrong weight, so these are never rounded.
_EXACT = {Role.ROUTER: "f32", Role.VECTOR: "f32"}

# With 4 bits in the experts alone, perplexity of the demo model grows by 0.4%; with 4 bits in the attention too, by
# 1.2% (docs/adr/0001).
_EIGHT_BIT_ROLES = (Role.EMBEDDING, Role.HEAD, Role.ATTENTION)
_FORMATS = {"q8": "q8_g32", "q4": "q4_g32", "bf16": "bf16", "f16": "f16", "f32": "f32"}

KEEP = "keep"
"""The value of `--weights` that gives each tensor the format it is stored in."""

WEIGHTS = (*_FORMATS, KEEP)
"""The values of `--weights`."""


@dataclass(frozen=True)
class Recipe:
    """One value of `--weights`. formats: that of each role; one that is absent is stored as it comes."""

    weights: str
    formats: dict[Role, str]

    def format(self, role: Role, source: Source) -> str:
        """Return the format of a weight."""
        # What no format holds as stored cannot be read either, and reading it gives the error that says so.
        return self.formats.get(role) or source.stored_format or "f32"

    def layout(self, role: Role, format: str) -> str:
        """Return the layout: embeddings are read by rows, vectors whole, everything else in tiles."""
        if role in (Role.EMBEDDING, Role.VECTOR):
            return "rows"
        return default_layout(format).name


def recipe_named(weights: str) -> Recipe:
    """Return the recipe; raises UsageError that lists the known ones."""
    if weights not in WEIGHTS:
        raise UsageError(f"weights {weights!r} is not known; choose one of {', '.join(WEIGHTS)}.")
    if weights == KEEP:
        return Recipe(weights, dict(_EXACT))
    formats = dict.fromkeys(Role, _FORMATS[weights]) | _EXACT
    if weights == "q4":
        formats |= dict.fromkeys(_EIGHT_BIT_ROLES, _FORMATS["q8"])
    return Recipe(weights, formats)
