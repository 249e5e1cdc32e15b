"""Speed from a budget and measurements: what the planner promises, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.runtime.budget import Budget
from colibri.runtime.probe_model import TokenBytes


@dataclass(frozen=True)
class Speeds:
    """Bytes for each second: weights in decoding, weights x tokens in prompts, records from the disk."""

    decode: float
    prompt: float
    disk: float


@dataclass(frozen=True)
class Prediction:
    """Tokens for each second, what bounds them, and bytes of experts read for each token."""

    decode: float
    decode_bound: str  # "memory" or "disk"
    decode_bytes_read: float
    prompt: float
    prompt_bound: str  # "arithmetic" or "disk"


def predict(budget: Budget, weights: TokenBytes, speeds: Speeds, hit_share: float, prompt_tokens: int) -> Prediction:
    """What a model will reach when `hit_share` of the experts that a token needs are in memory.

    Decoding is meant after a prompt of `prompt_tokens`, whose state each token reads. Reads go on while resident
    experts are computed, not while the rest of a layer is.
    """
    state = budget.model.session_bytes * min(prompt_tokens, budget.wishes.context) // budget.wishes.context
    compute = (weights.all + state) / speeds.decode
    missed = (1 - hit_share) * weights.experts
    reading = missed / speeds.disk + (weights.all - weights.experts + state) / speeds.decode if missed else 0.0

    chunk = max(1, min(budget.max_batch_tokens, prompt_tokens))
    chunk_compute = chunk * (weights.dense + weights.experts) / speeds.prompt
    share = budget.model.token_expert_bytes / max(1, budget.model.all_expert_bytes)
    used = 1 - (1 - min(1.0, share)) ** chunk  # the tokens of a chunk together use nearly all experts of a layer
    chunk_missed = max(0.0, used * budget.model.all_expert_bytes - budget.expert_bytes)
    chunk_reading = chunk_missed / speeds.disk
    if chunk_missed:
        chunk_reading += chunk * weights.dense / speeds.prompt
    return Prediction(
        decode=1 / max(compute, reading),
        decode_bound="disk" if reading > compute else "memory",
        decode_bytes_read=missed,
        prompt=chunk / max(chunk_compute, chunk_reading),
        prompt_bound="disk" if chunk_reading > chunk_compute else "arithmetic",
    )
