"""A program built by hand that uses every op, with random weights."""

from __future__ import annotations

import numpy as np

from colibri.program import ProgramBuilder
from colibri.program.ops import Activation, Flag, Pairing
from colibri.reference import Expert, Model, Weight

VOCABULARY, WIDTH, FFN, EXPERTS, CHOSEN = 11, 12, 10, 5, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6


def small_builder() -> ProgramBuilder:
    """One layer: windowed attention, a router with experts, and a gated shared expert."""
    b = ProgramBuilder()
    for name, width in {
        "hidden": WIDTH,
        "normed": WIDTH,
        "mixed": WIDTH,
        "q": HEADS * HEAD_DIM,
        "k": KV_HEADS * HEAD_DIM,
        "v": KV_HEADS * HEAD_DIM,
        "attended": HEADS * HEAD_DIM,
        "table": 4,
        "router_logits": EXPERTS,
        "gate": FFN,
        "up": FFN,
        "shared_gate": 1,
    }.items():
        b.tokens(name, width)
    b.routing("routing", CHOSEN, EXPERTS)
    b.outputs("last", WIDTH)
    b.outputs("logits", VOCABULARY)
    b.attention_state("cache", kv_heads=KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM, layer=0)
    b.expert_set("experts")

    b.op("embed", y="hidden", table="embedding")
    b.op("rope_table", table="table", inverse_frequencies="inverse_frequencies", scale=1.25)
    b.op("rms_norm", layer=0, y="normed", x="hidden", weight="norm", group=WIDTH, epsilon=1e-6)
    for name in ("q", "k", "v"):
        b.op("matmul", layer=0, y=name, x="normed", weight=f"{name}_weight", bias="q_bias" if name == "q" else None)
        b.op("clamp", layer=0, y=name, x=name, low=-1.5, high=1.5)
    for name in ("q", "k"):
        b.op("rope", layer=0, y=name, x=name, table="table", head_dim=HEAD_DIM, pairing=Pairing.HALF)
    b.op("attention", layer=0, y="attended", q="q", k="k", v="v", cache="cache", heads=HEADS, window=5, scale=0.4)
    b.op("matmul", layer=0, y="mixed", x="attended", weight="o_weight")
    b.op("add", layer=0, y="hidden", a="hidden", b="mixed")
    b.op("matmul", layer=0, y="router_logits", x="hidden", weight="router")
    b.op("route", layer=0, routing="routing", logits="router_logits", normalise=Flag.NO, scale=2.0)
    b.op("experts", layer=0, y="mixed", x="hidden", routing="routing", set="experts", activation=Activation.SILU)
    b.op("matmul", layer=0, y="gate", x="hidden", weight="shared_gate_proj")
    b.op("matmul", layer=0, y="up", x="hidden", weight="shared_up_proj")
    b.op("gated_activation", layer=0, y="gate", gate="gate", up="up", activation=Activation.SILU)
    b.op("matmul", layer=0, y="normed", x="gate", weight="shared_down_proj")
    b.op("matmul", layer=0, y="shared_gate", x="hidden", weight="shared_gate")
    b.op("sigmoid_gate", layer=0, y="normed", x="normed", gate="shared_gate")
    b.op("add", layer=0, y="mixed", a="mixed", b="normed")
    b.op("add", layer=0, y="hidden", a="hidden", b="mixed")
    b.op("gather_outputs", y="last", x="hidden")
    b.op("matmul", y="logits", x="last", weight="head")
    b.output("logits", "logits")
    return b


def small_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 [rows, columns] by name, for `small_builder`."""
    generator = np.random.default_rng(seed)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "inverse_frequencies": (1, 2),
        "norm": (1, WIDTH),
        "q_weight": (HEADS * HEAD_DIM, WIDTH),
        "q_bias": (1, HEADS * HEAD_DIM),
        "k_weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "v_weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "o_weight": (WIDTH, HEADS * HEAD_DIM),
        "router": (EXPERTS, WIDTH),
        "shared_gate_proj": (FFN, WIDTH),
        "shared_up_proj": (FFN, WIDTH),
        "shared_down_proj": (WIDTH, FFN),
        "shared_gate": (1, WIDTH),
        "head": (VOCABULARY, WIDTH),
    }
    return {
        name: (generator.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }


def small_experts(seed: int = 1) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """gate, up [FFN, WIDTH] and down [WIDTH, FFN] of each expert."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    return [(matrix(FFN, WIDTH), matrix(FFN, WIDTH), matrix(WIDTH, FFN)) for _ in range(EXPERTS)]


def small_model() -> Model:
    """The program with its weights, not quantised."""
    builder = small_builder()
    program = builder.build(vocabulary_size=VOCABULARY, context_limit=64, default_state_format=1)
    weights = small_weights()
    experts = [Expert(*map(Weight, matrices)) for matrices in small_experts()]
    return Model(program, [Weight(weights[name]) for name in builder.weight_names], [experts])
