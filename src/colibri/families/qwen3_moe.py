"""Qwen3-MoE: RMS norm of each query and key head, top-k experts, dense layers by configuration.

Rules from transformers' Qwen3MoeConfig and modeling_qwen3_moe.
"""

from __future__ import annotations

from colibri.checkpoint import Checkpoint
from colibri.families.config import ConfigReader
from colibri.families.decoder import DecoderPlanner
from colibri.families.plan import ModelPlan
from colibri.families.sizes import Moe, read_moe, read_sizes

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def plan(checkpoint: Checkpoint) -> ModelPlan:
    """Return the plan; raises UnsupportedModelError or CheckpointError, naming the key or tensor."""
    config = ConfigReader(checkpoint)
    sizes = read_sizes(config, default_kv_heads=4)
    moe = read_moe(config, ffn_key="moe_intermediate_size", normalise=config.flag("norm_topk_prob", default=False))
    sparse = sparse_layers(config, moe, sizes.layer_count)
    bias = config.flag("attention_bias", default=False)
    window = config.integer("sliding_window", default=4096, minimum=0)
    if not config.flag("use_sliding_window", default=False):
        window = 0
    # All layers slide or none: the reference does not read this key in Qwen3-MoE.
    config.skip("max_window_layers")
    dense_ffn = config.integer("intermediate_size", default=6144)
    planner = DecoderPlanner("qwen3_moe", checkpoint, config, sizes)
    for layer in range(sizes.layer_count):
        planner.attention(layer, bias=bias, output_bias=bias, norm="head", window=window)
        if sparse[layer]:
            planner.moe_block(layer, moe)
        else:
            planner.dense_block(layer, dense_ffn)
    return planner.finish()


def sparse_layers(config: ConfigReader, moe: Moe, layer_count: int) -> list[bool]:
    """Say for each layer whether it has experts: not in mlp_only_layers, and every decoder_sparse_step-th from 1."""
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.integers("mlp_only_layers")
    return [moe.experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layer_count)]
