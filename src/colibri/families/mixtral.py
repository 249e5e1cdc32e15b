"""Mixtral: every layer sparse, the chosen probabilities always normalised, an optional window on every layer.

Rules from transformers' MixtralConfig and modeling_mixtral.
"""

from __future__ import annotations

from colibri.checkpoint import Checkpoint
from colibri.families.config import ConfigReader
from colibri.families.decoder import DecoderPlanner
from colibri.families.plan import ModelPlan
from colibri.families.sizes import read_moe, read_sizes

ARCHITECTURES = ("MixtralForCausalLM",)


def plan(checkpoint: Checkpoint) -> ModelPlan:
    """Return the plan; raises UnsupportedModelError or CheckpointError, naming the key or tensor."""
    config = ConfigReader(checkpoint)
    sizes = read_sizes(config, default_kv_heads=8, default_epsilon=1e-5)
    moe = read_moe(config, ffn_key="intermediate_size", normalise=True, names=("w1", "w3", "w2"))
    window = config.optional_integer("sliding_window") or 0
    planner = DecoderPlanner("mixtral", checkpoint, config, sizes, theta=1e6)
    for layer in range(sizes.layer_count):
        planner.attention(layer, window=window)
        # transformers 5 calls the block `mlp` in memory, files call it block_sparse_moe.
        planner.moe_block(layer, moe, prefixes=("block_sparse_moe", "mlp"))
    return planner.finish()
