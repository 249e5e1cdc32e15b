"""Every op of the op table as a short NumPy function: the readable definition of what a program computes.

Shapes: n is the number of tokens of the call (or, after `gather_outputs`, of rows whose logits are wanted). Values are
float32 [n, width]. Inside an op sums run in float64 and the result is rounded to float32 once, so an op is closer to
the real number than any float32 order of summation, and hardly depends on how many rows are computed together. The C
core fixes an order of float32 operations instead: the two agree within a tolerance, and only the quantisation of
activations is the same arithmetic bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colibri.errors import NonFiniteError
from colibri.program.ops import Activation, Pairing
from colibri.quantize import quantise_activations


@dataclass(frozen=True)
class Weight:
    """A matrix float32 [rows, columns], or a vector as [1, columns].

    A quantised matrix is stored as its exact values code * scale; `quantised` says that it multiplies int8 activations.
    """

    values: np.ndarray
    quantised: bool = False

    @property
    def vector(self) -> np.ndarray:
        """The one row of a vector, float32 [columns]."""
        return self.values[0]


@dataclass(frozen=True)
class Expert:
    """One feed-forward network: gate and up [ffn, width], down [width, ffn]."""

    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class Routing:
    """The experts chosen for each token, best first: ids int64 [n, chosen] and weights float32 [n, chosen]."""

    experts: np.ndarray
    weights: np.ndarray


def embed(table: Weight, tokens: np.ndarray) -> np.ndarray:
    """y[t] = table[tokens[t]]; tokens uint32 [n]."""
    return table.values[tokens]


def rms_norm(x: np.ndarray, weight: Weight, group: int, epsilon: float) -> np.ndarray:
    """Each group of `group` consecutive values (a row, or a head) is divided by its root mean square:

    y = x / sqrt(mean(x^2) + epsilon) * weight. Raises NonFiniteError where the sum of squares is beyond float32.
    """
    groups = x.astype(np.float64).reshape(len(x), -1, group)
    squares = np.sum(groups**2, axis=2, keepdims=True)
    require_finite(squares.astype(np.float32), "op rms_norm, the sum of squares")
    mean_square = squares / group
    y = groups / np.sqrt(mean_square + epsilon) * weight.vector
    return y.reshape(x.shape).astype(np.float32)


def matmul(x: np.ndarray, weight: Weight, bias: Weight | None = None) -> np.ndarray:
    """y[t, row] = sum over k of weight[row, k] * x[t, k], then + bias[row]; x [n, columns], y [n, rows].

    A quantised weight sees x as int8 codes with one scale for each 128 k. Every product
    (activation code * scale) * (weight code * scale) has at most 51 bits, so it is exact in float64.
    """
    factor = x.astype(np.float64)
    if weight.quantised:
        codes, scales = quantise_activations(x)
        blocks = codes.astype(np.float64) * scales[:, :, None]
        factor = blocks.reshape(len(x), -1)[:, : x.shape[1]]
    y = (factor @ weight.values.astype(np.float64).T).astype(np.float32)
    return y if bias is None else y + bias.vector


def rope_table(positions: np.ndarray, inverse_frequencies: Weight, scale: float) -> np.ndarray:
    """Cosines, then sines, of every position's angles: [n, 2 * frequencies].

    The angle is the float32 product position * inverse_frequency: at large positions its rounding is visible, and
    models are trained with it.
    """
    angles = positions.astype(np.float32)[:, None] * inverse_frequencies.vector
    angles = angles.astype(np.float64)
    return (scale * np.concatenate((np.cos(angles), np.sin(angles)), axis=1)).astype(np.float32)


def rope(x: np.ndarray, table: np.ndarray, head_dim: int, pairing: Pairing) -> np.ndarray:
    """Rotate pairs (a, b) of each head: (a * cos - b * sin, b * cos + a * sin).

    `half` pairs value i with i + rotary / 2, `interleaved` 2i with 2i + 1, where rotary = width of the table; values
    beyond rotary pass unchanged.
    """
    rotary = table.shape[1]
    half = rotary // 2
    first, second = (
        (slice(0, half), slice(half, rotary))
        if pairing == Pairing.HALF
        else (
            slice(0, rotary, 2),
            slice(1, rotary, 2),
        )
    )
    heads = x.astype(np.float64).reshape(len(x), -1, head_dim)
    cosines, sines = table[:, None, :half], table[:, None, half:]
    a, b = heads[:, :, first], heads[:, :, second]
    y = heads.copy()
    y[:, :, first] = a * cosines - b * sines
    y[:, :, second] = b * cosines + a * sines
    return y.reshape(x.shape).astype(np.float32)


def clamp(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """y = min(max(x, low), high)."""
    return np.clip(x, np.float32(low), np.float32(high))


def attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, heads: int, window: int, scale: float
) -> np.ndarray:
    """y = softmax(scale * q k) v for each head, over the keys that a position may see.

    q [n, heads * key_dim] at `positions` [n]; keys [m, kv_heads, key_dim] and values [m, kv_heads, value_dim] of
    positions 0 to m - 1, those of this call included. heads / kv_heads neighbouring query heads share one kv head.
    A position sees itself and what came before: everything (window = 0), or the last `window` positions with itself.
    """
    kv_heads = keys.shape[1]
    queries = q.astype(np.float64).reshape(len(q), kv_heads, heads // kv_heads, -1)
    scores = scale * np.einsum("nhgd,mhd->nhgm", queries, keys.astype(np.float64), optimize=True)
    distance = positions[:, None] - np.arange(len(keys))[None, :]
    visible = distance >= 0
    if window:
        visible &= distance < window
    scores = np.where(visible[:, None, None, :], scores, -np.inf)
    y = np.einsum("nhgm,mhd->nhgd", softmax(scores), values.astype(np.float64), optimize=True)
    return y.reshape(len(q), -1).astype(np.float32)


def route(logits: np.ndarray, chosen: int, normalise: bool, scale: float) -> Routing:
    """Choose `chosen` of the experts for each token; logits [n, experts].

    The softmax runs over all experts. Without `normalise` the weights are those probabilities, whose sum is below 1.
    Equal probabilities: the lowest expert comes first.
    """
    probabilities = softmax(logits.astype(np.float64)).astype(np.float32)
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :chosen]
    weights = np.take_along_axis(probabilities, order, axis=1).astype(np.float64)
    if normalise:
        weights /= weights.sum(axis=1, keepdims=True)
    return Routing(order, (weights * scale).astype(np.float32))


def experts(x: np.ndarray, routing: Routing, expert_set: Sequence[Expert], activation: Activation) -> np.ndarray:
    """y = sum of weight * expert(x) over the chosen experts, in the order of their rank.

    expert(x) = down(act(gate(x)) * up(x)). Raises NonFiniteError that names the expert.
    """
    chosen = routing.experts.shape[1]
    outputs = np.zeros((len(x), chosen, x.shape[1]), np.float32)
    for number in np.unique(routing.experts):
        expert = expert_set[number]
        tokens, ranks = np.nonzero(routing.experts == number)
        rows = x[tokens]
        hidden = gated_activation(matmul(rows, expert.gate), matmul(rows, expert.up), activation)
        require_finite(hidden, f"expert {number}")
        outputs[tokens, ranks] = matmul(hidden, expert.down)
        require_finite(outputs[tokens, ranks], f"expert {number}")
    y = np.zeros(x.shape, np.float32)
    for rank in range(chosen):
        weight = routing.weights[:, rank, None].astype(np.float64)
        y = (weight * outputs[:, rank] + y).astype(np.float32)
    return y


def gated_activation(gate: np.ndarray, up: np.ndarray, activation: Activation) -> np.ndarray:
    """y = act(gate) * up, where silu(gate) = gate * sigmoid(gate)."""
    assert activation == Activation.SILU
    gate = gate.astype(np.float64)
    return (gate * sigmoid(gate) * up).astype(np.float32)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """y = a + b."""
    return a + b


def sigmoid_gate(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """y = sigmoid(gate) * x, one gate value [n, 1] for each row."""
    return (sigmoid(gate.astype(np.float64)) * x).astype(np.float32)


def gather_outputs(x: np.ndarray, output_rows: np.ndarray) -> np.ndarray:
    """The rows of x whose logits are wanted; output_rows int64 [outputs]."""
    return x[output_rows]


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) / sum(exp(x)) over the last axis, float64."""
    exponentials = exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), float64; exp may overflow to infinity, which gives 0."""
    return 1.0 / (1.0 + exp(-x))


def exp(x: np.ndarray) -> np.ndarray:
    """exp(x), float64, but +0 below the smallest normal float32, where the numeric contract ends.

    This decides router choices: experts that far behind the best are equal, and the lowest number goes first.
    """
    with np.errstate(over="ignore", under="ignore"):
        result = np.exp(x)
    return np.where(result < 2.0**-126, 0.0, result)


def require_finite(values: np.ndarray, where: str) -> None:
    """Raise NonFiniteError that begins with `where` if any value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise NonFiniteError(f"{where}: NaN or infinity appeared; check the weights of the model")
