"""Quantised tiny models: the C core against the reference, and both against the model in float32.

Two executors whose float32 sums differ in the last bit can round an activation to neighbouring int8 codes, or a key
to neighbouring values of the state format. Such a step can be as large as the quantisation noise itself and reaches
every later value of its token, so single logits have no useful bound. Short timelines keep most tokens free of it.
"""

from __future__ import annotations

import numpy as np
import pytest
from parity.backends import BACKENDS, opened
from parity.tiny_models import TinyCase

# Two blocks of activations, with tails.
_WIDE = {"hidden_size": 192, "intermediate_size": 136}
_WIDE_MOE = {**_WIDE, "moe_intermediate_size": 152}
CASES = [
    TinyCase("wide", "qwen3_moe", _WIDE_MOE),
    TinyCase("wide", "qwen2_moe", {**_WIDE_MOE, "shared_expert_intermediate_size": 40}),
    TinyCase("wide", "mixtral", _WIDE),
    TinyCase("wide", "olmoe", _WIDE),
]


@pytest.mark.parametrize("state_format", ["f32", "f16", "q8"])
@pytest.mark.parametrize("weights", ["q8", "q4", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_equals_reference(case: TinyCase, weights: str, state_format: str, converted) -> None:
    model = converted(case, weights)
    differences = []
    with (
        opened("reference", model.path, state_format) as reference,
        opened("native", model.path, state_format) as native,
    ):
        for start in range(0, len(model.expected.tokens), 3):
            tokens = model.expected.tokens[start : start + 3]
            difference = native.session().forward(tokens) - reference.session().forward(tokens)
            differences.append(np.abs(difference).max(axis=1))
    rows = np.concatenate(differences)
    assert np.median(rows) < 1e-4
    assert np.mean(rows < 2e-3) > 0.85
    assert rows.max() < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("weights", "limit"), [("q8", 0.01), ("q4", 0.03), ("bf16", 0.005), ("f16", 1e-4)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantised_stays_near_the_model(case: TinyCase, weights: str, limit: float, backend: str, converted) -> None:
    model = converted(case, weights)
    with opened(backend, model.path, "f16") as executor:
        logits = executor.session().forward(model.expected.tokens)
    divergence = kl_divergence(model.expected.logits, logits)
    assert 1e-9 < divergence.mean() < limit


def kl_divergence(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """KL(expected || actual) of each row of logits, in nats."""
    p, q = log_softmax(expected), log_softmax(actual)
    return (np.exp(p) * (p - q)).sum(axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
