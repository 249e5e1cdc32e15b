"""A small program that uses every op, built without a family, and the shapes of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.program import Program, ProgramBuilder
from colibri.program.ops import Activation, Flag, Pairing

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, CHOSEN, LAYERS = 24, 15, 4, 2, 6, 12, 3, 2, 2


@dataclass(frozen=True)
class HandBuilt:
    """vectors: shapes of tensors that are read whole; (name, rows, cols) of all weights in order."""

    program: Program
    weights: tuple[tuple[str, int, int], ...]
    vectors: frozenset[str]
    expert_sets: tuple[tuple[int, int, int], ...]

    def tensors(self, format: str = "f32") -> list[tuple[str, str, str, int, int]]:
        """Descriptions for `verify`, matrices in `format`."""
        tiled = "tiled16" if format in ("f32", "f16", "bf16") else "tiled16x4"
        return [
            (name, "f32", "rows", rows, cols) if name in self.vectors else (name, format, tiled, rows, cols)
            for name, rows, cols in self.weights
        ]


def hand_built() -> HandBuilt:
    """Return the program: two layers with attention, experts and a gated shared expert."""
    b = ProgramBuilder()
    shapes: dict[str, tuple[int, int]] = {}
    vectors = set()

    def matrix(name: str, rows: int, cols: int) -> str:
        shapes[name] = rows, cols
        return name

    def vector(name: str, size: int) -> str:
        vectors.add(name)
        return matrix(name, 1, size)

    for name, width in (("x", WIDTH), ("h", WIDTH), ("d", WIDTH), ("shared", WIDTH), ("scale", 1), ("rope", HEAD_DIM)):
        b.tokens(name, width)
    for name, width in (("q", HEADS * HEAD_DIM), ("a", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM)):
        b.tokens(name, width)
    b.tokens("v", KV_HEADS * HEAD_DIM)
    b.tokens("gate", FFN)
    b.tokens("up", FFN)
    b.tokens("router", EXPERTS)
    b.routing("routing", CHOSEN, EXPERTS)
    b.outputs("last", WIDTH)
    b.outputs("logits", VOCABULARY)

    b.op("embed", y="x", table=matrix("embedding", VOCABULARY, WIDTH))
    b.op("rope_table", table="rope", inverse_frequencies=vector("frequencies", HEAD_DIM // 2), scale=1.0)
    for i in range(LAYERS):
        b.op("rms_norm", layer=i, y="h", x="x", weight=vector(f"{i}.norm", WIDTH), group=WIDTH, epsilon=1e-6)
        for part, width in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            bias = vector(f"{i}.{part}_bias", width) if part == "q" else None
            b.op("matmul", layer=i, y=part, x="h", weight=matrix(f"{i}.{part}", width, WIDTH), bias=bias)
            b.op("clamp", layer=i, y=part, x=part, low=-2.0, high=2.0)
        for part in ("q", "k"):
            b.op("rope", layer=i, y=part, x=part, table="rope", head_dim=HEAD_DIM, pairing=Pairing.HALF)
        cache = b.attention_state(f"cache {i}", kv_heads=KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM, layer=i)
        b.op("attention", layer=i, y="a", q="q", k="k", v="v", cache=cache, heads=HEADS, window=0, scale=0.4)
        b.op("matmul", layer=i, y="d", x="a", weight=matrix(f"{i}.o", WIDTH, HEADS * HEAD_DIM))
        b.op("add", layer=i, y="x", a="x", b="d")
        b.op("matmul", layer=i, y="router", x="x", weight=matrix(f"{i}.router", EXPERTS, WIDTH))
        b.op("route", layer=i, routing="routing", logits="router", normalise=Flag.YES, scale=1.0)
        experts = b.expert_set(f"experts {i}")
        b.op("experts", layer=i, y="d", x="x", routing="routing", set=experts, activation=Activation.SILU)
        b.op("matmul", layer=i, y="gate", x="x", weight=matrix(f"{i}.gate", FFN, WIDTH))
        b.op("matmul", layer=i, y="up", x="x", weight=matrix(f"{i}.up", FFN, WIDTH))
        b.op("gated_activation", layer=i, y="gate", gate="gate", up="up", activation=Activation.SILU)
        b.op("matmul", layer=i, y="shared", x="gate", weight=matrix(f"{i}.down", WIDTH, FFN))
        b.op("matmul", layer=i, y="scale", x="x", weight=matrix(f"{i}.scale", 1, WIDTH))
        b.op("sigmoid_gate", layer=i, y="shared", x="shared", gate="scale")
        b.op("add", layer=i, y="d", a="d", b="shared")
        b.op("add", layer=i, y="x", a="x", b="d")
    b.op("gather_outputs", y="last", x="x")
    b.op("matmul", y="logits", x="last", weight="embedding")
    b.output("logits", "logits")
    program = b.build(vocabulary_size=VOCABULARY, context_limit=128)
    weights = tuple((name, *shapes[name]) for name in b.weight_names)
    return HandBuilt(program, weights, frozenset(vectors), ((EXPERTS, WIDTH, FFN),) * LAYERS)
