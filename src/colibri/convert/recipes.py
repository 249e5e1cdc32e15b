"""Which format each weight gets: the choices behind `--weights`."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.errors import UsageError
from colibri.families import Role

# Small and sensitive: a wrong expert is worse than a slightly wrong weight, so these are never rounded.
_EXACT = {Role.ROUTER: "f32", Role.VECTOR: "f32"}

# With 4 bits in the experts alone, perplexity of the demo model grows by 0.4%; with 4 bits in the attention too, by
# 1.2% (docs/adr/0001).
_EIGHT_BIT_ROLES = (Role.EMBEDDING, Role.HEAD, Role.ATTENTION)
_FORMATS = {"q8": "q8_g32", "q4": "q4_g32", "bf16": "bf16", "f16": "f16", "f32": "f32"}

WEIGHTS = tuple(_FORMATS)
"""The values of `--weights`."""


@dataclass(frozen=True)
class Recipe:
    """One value of `--weights` and the format of each role."""

    weights: str
    formats: dict[Role, str]

    def layout(self, role: Role) -> str:
        """Return the layout: embeddings are read by rows, vectors whole, everything else in tiles."""
        if role in (Role.EMBEDDING, Role.VECTOR):
            return "rows"
        return "tiled16x4" if self.formats[role].startswith("q") else "tiled16"


def recipe_named(weights: str) -> Recipe:
    """Return the recipe; raises UsageError that lists the known ones."""
    if weights not in _FORMATS:
        raise UsageError(f"weights {weights!r} is not known; choose one of {', '.join(WEIGHTS)}.")
    formats = dict.fromkeys(Role, _FORMATS[weights]) | _EXACT
    if weights == "q4":
        formats |= dict.fromkeys(_EIGHT_BIT_ROLES, _FORMATS["q8"])
    return Recipe(weights, formats)
