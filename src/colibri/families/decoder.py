"""The parts that decoder families share: embedding, attention, feed-forward blocks, experts and head.

A family reads its configuration, then calls these in the order of its layers. Everything a family decides is an
argument; nothing here asks which family it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from colibri.checkpoint import Checkpoint
from colibri.errors import CheckpointError
from colibri.families.config import ConfigReader
from colibri.families.plan import ArraySource, ExpertSetPlan, ModelPlan, Role, Source, WeightPlan
from colibri.families.rope import Rope, read_rope
from colibri.families.sizes import DecoderSizes, Moe
from colibri.families.tensors import ModelTensors
from colibri.program import ProgramBuilder
from colibri.program.ops import Activation, Flag, Pairing


class DecoderPlanner:
    """Builds the program of a decoder and collects its weights, layer by layer.

    Call the block methods in order, then `finish`. Reads RoPE, and ends the reading of config.json: the family must
    have read its own keys before.
    """

    def __init__(
        self, family: str, checkpoint: Checkpoint, config: ConfigReader, sizes: DecoderSizes, theta: float = 10000.0
    ) -> None:
        self._family = family
        self._sizes = sizes
        self._rope: Rope = read_rope(config, head_dim=sizes.head_dim, default_theta=theta)
        self._tied = config.flag("tie_word_embeddings", default=False)
        config.finish()
        self.tensors = ModelTensors(checkpoint)
        self._where = str(checkpoint.path)
        self._builder = ProgramBuilder()
        self._weights: list[WeightPlan] = []
        self._expert_sets: list[ExpertSetPlan] = []
        self._declare_values()
        self._begin()

    def attention(
        self,
        layer: int,
        *,
        bias: bool = False,
        output_bias: bool = False,
        norm: Literal["head", "whole"] | None = None,
        clip: float | None = None,
        window: int = 0,
    ) -> None:
        """Add x + attention(norm(x)).

        bias: q, k and v have one; output_bias: o has one. norm: RMS norm of q and k, of each head or of the whole
        vector. clip: q, k and v are then limited to [-clip, clip]. Rotation comes last. window 0 sees every position.
        """
        sizes, op = self._sizes, self._builder.op
        here, there = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn"
        self._norm(f"{here}.norm", f"model.layers.{layer}.input_layernorm.weight", layer)
        for part, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            width = heads * sizes.head_dim
            meaning = "num_attention_heads x head_dim" if part == "q" else "num_key_value_heads x head_dim"
            source = self.tensors.matrix(
                f"{there}.{part}_proj.weight", width, sizes.hidden_size, f"{meaning} by hidden_size"
            )
            weight = self._weight(f"{here}.{part}", Role.ATTENTION, source)
            bias_name = self._bias(f"{here}.{part}_bias", f"{there}.{part}_proj.bias", width, meaning) if bias else None
            op("matmul", layer=layer, y=part, x="normed", weight=weight, bias=bias_name)
            if norm and part != "v":
                group = sizes.head_dim if norm == "head" else width
                vector = self.tensors.vector(
                    f"{there}.{part}_norm.weight", group, "head_dim" if norm == "head" else meaning
                )
                weight = self._weight(f"{here}.{part}_norm", Role.VECTOR, vector)
                op("rms_norm", layer=layer, y=part, x=part, weight=weight, group=group, epsilon=sizes.epsilon)
            if clip is not None:
                op("clamp", layer=layer, y=part, x=part, low=-clip, high=clip)
            if part != "v":
                op("rope", layer=layer, y=part, x=part, table="rope", head_dim=sizes.head_dim, pairing=Pairing.HALF)
        state = self._builder.attention_state(
            f"layer {layer}", kv_heads=sizes.kv_heads, key_dim=sizes.head_dim, value_dim=sizes.head_dim, layer=layer
        )
        op(
            "attention", layer=layer, y="attended", q="q", k="k", v="v", cache=state,
            heads=sizes.heads, window=window, scale=sizes.head_dim**-0.5,
        )  # fmt: skip
        source = self.tensors.matrix(
            f"{there}.o_proj.weight", sizes.hidden_size, sizes.heads * sizes.head_dim,
            "hidden_size by num_attention_heads x head_dim",
        )  # fmt: skip
        weight = self._weight(f"{here}.o", Role.ATTENTION, source)
        bias_name = None
        if output_bias:
            bias_name = self._bias(f"{here}.o_bias", f"{there}.o_proj.bias", sizes.hidden_size, "hidden_size")
        op("matmul", layer=layer, y="delta", x="attended", weight=weight, bias=bias_name)
        op("add", layer=layer, y="x", a="x", b="delta")

    def dense_block(self, layer: int, ffn: int) -> None:
        """Add x + mlp(norm(x)) with the layer's own gate, up and down projections."""
        self._block_norm(layer)
        self._mlp(layer, "mlp", f"model.layers.{layer}.mlp", "dense", ffn, "intermediate_size", y="delta")
        self._builder.op("add", layer=layer, y="x", a="x", b="delta")

    def moe_block(self, layer: int, moe: Moe, *, prefixes: Sequence[str] = ("mlp",), shared_ffn: int = 0) -> None:
        """Add x + experts(norm(x)), and with shared_ffn > 0 a shared expert weighted by the sigmoid of its gate.

        prefixes: names the block goes by in files of this family; the first that has a router is taken.
        """
        builder, width = self._builder, self._sizes.hidden_size
        there = [f"model.layers.{layer}.{prefix}" for prefix in prefixes]
        there = next((name for name in there if self.tensors.has(f"{name}.gate.weight")), there[0])
        here = f"layers.{layer}"
        self._block_norm(layer)
        router = self.tensors.matrix(f"{there}.gate.weight", moe.experts, width, "experts by hidden_size")
        logits, routing = (
            builder.tokens("router_logits", moe.experts),
            builder.routing("routing", moe.chosen, moe.experts),
        )
        weight = self._weight(f"{here}.router", Role.ROUTER, router)
        builder.op("matmul", layer=layer, y=logits, x="normed", weight=weight)
        builder.op("route", layer=layer, routing=routing, logits=logits, normalise=Flag(moe.normalise), scale=1.0)
        experts = self.tensors.experts(f"{there}.experts.", moe.names, moe.experts, width, moe.ffn)
        self._expert_sets.append(ExpertSetPlan(layer, width, moe.ffn, experts))
        builder.op(
            "experts", layer=layer, y="delta", x="normed", routing=routing,
            set=builder.expert_set(f"layer {layer}"), activation=Activation.SILU,
        )  # fmt: skip
        if shared_ffn:
            self._shared_expert(layer, there, shared_ffn)
        builder.op("add", layer=layer, y="x", a="x", b="delta")

    def finish(self) -> ModelPlan:
        """Add the final norm and the head and return the plan.

        A tied head is the embedding even where the file holds another (as in transformers). Raises CheckpointError
        for a head, or any other tensor, that is missing or that nothing uses.
        """
        sizes, builder = self._sizes, self._builder
        builder.outputs("last", sizes.hidden_size)
        builder.outputs("logits", sizes.vocabulary_size)
        builder.op("gather_outputs", y="last", x="x")
        self._norm("norm", "model.norm.weight", None, y="last", x="last")
        head, notes = self._head()
        builder.op("matmul", y="logits", x="last", weight=head)
        builder.output("logits", "logits")
        notes += self.tensors.finish(sizes.layer_count)
        program = builder.build(vocabulary_size=sizes.vocabulary_size, context_limit=self._rope.context_limit)
        # The program numbers weights in the order of first use, and each was recorded just before its op.
        weights = tuple(self._weights)
        assert tuple(weight.name for weight in weights) == builder.weight_names
        return ModelPlan(self._family, program, weights, tuple(self._expert_sets), tuple(notes))

    def _head(self) -> tuple[str, list[str]]:
        """Return the weight's name and notes."""
        stored = "lm_head.weight"
        if self._tied and not self.tensors.has(stored):
            return "embedding", []
        if self._tied:
            self.tensors.ignore(stored)
            return "embedding", [f"{stored} is not used: tie_word_embeddings makes the embedding the head."]
        if not self.tensors.has(stored):
            raise CheckpointError(f"{self._where} has no {stored}, and tie_word_embeddings is false; one must change.")
        sizes = self._sizes
        source = self.tensors.matrix(stored, sizes.vocabulary_size, sizes.hidden_size, "vocab_size by hidden_size")
        return self._weight("head", Role.HEAD, source), []

    def _declare_values(self) -> None:
        sizes, builder = self._sizes, self._builder
        for name in ("x", "normed", "delta"):
            builder.tokens(name, sizes.hidden_size)
        builder.tokens("rope", sizes.head_dim)
        for name, heads in (
            ("q", sizes.heads),
            ("k", sizes.kv_heads),
            ("v", sizes.kv_heads),
            ("attended", sizes.heads),
        ):
            builder.tokens(name, heads * sizes.head_dim)

    def _begin(self) -> None:
        sizes = self._sizes
        embedding = self.tensors.matrix(
            "model.embed_tokens.weight", sizes.vocabulary_size, sizes.hidden_size, "vocab_size by hidden_size"
        )
        role = Role.HEAD if self._tied else Role.EMBEDDING
        self._builder.op("embed", y="x", table=self._weight("embedding", role, embedding))
        frequencies = np.ascontiguousarray(self._rope.inverse_frequencies, dtype=np.float32).reshape(1, -1)
        weight = self._weight("rope.inverse_frequencies", Role.VECTOR, ArraySource("RoPE frequencies", frequencies))
        self._builder.op("rope_table", table="rope", inverse_frequencies=weight, scale=self._rope.scale)

    def _weight(self, name: str, role: Role, source: Source) -> str:
        self._weights.append(WeightPlan(name, role, source))
        return name

    def _bias(self, name: str, tensor: str, size: int, meaning: str) -> str:
        return self._weight(name, Role.VECTOR, self.tensors.vector(tensor, size, meaning))

    def _norm(self, name: str, tensor: str, layer: int | None, y: str = "normed", x: str = "x") -> None:
        size = self._sizes.hidden_size
        weight = self._weight(name, Role.VECTOR, self.tensors.vector(tensor, size, "hidden_size"))
        self._builder.op("rms_norm", layer=layer, y=y, x=x, weight=weight, group=size, epsilon=self._sizes.epsilon)

    def _block_norm(self, layer: int) -> None:
        self._norm(f"layers.{layer}.mlp.norm", f"model.layers.{layer}.post_attention_layernorm.weight", layer)

    def _mlp(self, layer: int, name: str, there: str, register: str, ffn: int, key: str, *, y: str) -> None:
        builder, width = self._builder, self._sizes.hidden_size
        gate, up = builder.tokens(f"{register}_gate", ffn), builder.tokens(f"{register}_up", ffn)
        for value, part in ((gate, "gate"), (up, "up")):
            source = self.tensors.matrix(f"{there}.{part}_proj.weight", ffn, width, f"{key} by hidden_size")
            weight = self._weight(f"layers.{layer}.{name}.{part}", Role.FEED_FORWARD, source)
            builder.op("matmul", layer=layer, y=value, x="normed", weight=weight)
        builder.op("gated_activation", layer=layer, y=gate, gate=gate, up=up, activation=Activation.SILU)
        source = self.tensors.matrix(f"{there}.down_proj.weight", width, ffn, f"hidden_size by {key}")
        weight = self._weight(f"layers.{layer}.{name}.down", Role.FEED_FORWARD, source)
        builder.op("matmul", layer=layer, y=y, x=gate, weight=weight)

    def _shared_expert(self, layer: int, there: str, ffn: int) -> None:
        builder, width = self._builder, self._sizes.hidden_size
        shared, scale = builder.tokens("shared", width), builder.tokens("shared_scale", 1)
        key = "shared_expert_intermediate_size"
        self._mlp(layer, "shared", f"{there}.shared_expert", "shared", ffn, key, y=shared)
        gate = self.tensors.matrix(f"{there}.shared_expert_gate.weight", 1, width, "1 by hidden_size")
        # As small and as sensitive as a router, so it is stored as one.
        weight = self._weight(f"layers.{layer}.shared.scale", Role.ROUTER, gate)
        builder.op("matmul", layer=layer, y=scale, x="normed", weight=weight)
        builder.op("sigmoid_gate", layer=layer, y=shared, x=shared, gate=scale)
        builder.op("add", layer=layer, y="delta", a="delta", b=shared)
