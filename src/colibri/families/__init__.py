"""Model families: each module turns config.json and tensor names of one model_type into a plan.

A module offers ARCHITECTURES and plan(checkpoint); adding one to _FAMILIES is all that a new family needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from colibri.checkpoint import Checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.families import mixtral, olmoe, qwen2_moe, qwen3_moe
from colibri.families.plan import ExpertSetPlan, ExpertSources, ModelPlan, Role, Source, TensorSource, WeightPlan


@dataclass(frozen=True)
class Family:
    """One entry of the registry."""

    model_type: str
    architectures: tuple[str, ...]
    plan: Callable[[Checkpoint], ModelPlan]


FAMILIES: dict[str, Family] = {
    name: Family(name, module.ARCHITECTURES, module.plan)
    for name, module in {
        "mixtral": mixtral,
        "olmoe": olmoe,
        "qwen2_moe": qwen2_moe,
        "qwen3_moe": qwen3_moe,
    }.items()
}


def plan_model(checkpoint: Checkpoint) -> ModelPlan:
    """Return the plan of a checkpoint of any supported family.

    The family is config.json's model_type, or where that is absent its architectures. Raises UnsupportedModelError
    for another family, and what the family raises.
    """
    return find_family(checkpoint).plan(checkpoint)


def find_family(checkpoint: Checkpoint) -> Family:
    """Return the family of a checkpoint; raises UnsupportedModelError that lists the supported ones."""
    config, where = checkpoint.config, checkpoint.config_source
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{where}: architectures = {architectures!r} should be a list of names.")
    supported = f"supported: {', '.join(FAMILIES)}"
    if model_type is None:
        for family in FAMILIES.values():
            if set(architectures) & set(family.architectures):
                return family
        raise UnsupportedModelError(f"{where} names no known model_type or architecture; {supported}.")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(f"{where}: model_type {model_type!r} is not supported; {supported}.")
    if architectures and not set(architectures) & set(family.architectures):
        raise UnsupportedModelError(
            f"{where}: architecture {', '.join(architectures)} is not supported; "
            f"supported: {', '.join(family.architectures)}."
        )
    return family


__all__ = [
    "FAMILIES", "ExpertSetPlan", "ExpertSources", "Family", "ModelPlan", "Role", "Source", "TensorSource",
    "WeightPlan",
    "find_family", "plan_model",
]  # fmt: skip
