"""Qwen2-MoE: biased q, k and v, a shared expert behind a sigmoid gate, dense and sliding layers by configuration.

Rules from transformers' Qwen2MoeConfig and modeling_qwen2_moe.
"""

from __future__ import annotations

from colibri.checkpoint import Checkpoint
from colibri.errors import UnsupportedModelError
from colibri.families.config import ConfigReader
from colibri.families.decoder import DecoderPlanner
from colibri.families.plan import ModelPlan
from colibri.families.qwen3_moe import sparse_layers
from colibri.families.sizes import read_moe, read_sizes

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


def plan(checkpoint: Checkpoint) -> ModelPlan:
    """Return the plan; raises UnsupportedModelError or CheckpointError, naming the key or tensor."""
    config = ConfigReader(checkpoint)
    sizes = read_sizes(config, default_kv_heads=16)
    moe = read_moe(config, ffn_key="moe_intermediate_size", normalise=config.flag("norm_topk_prob", default=False))
    sparse = sparse_layers(config, moe, sizes.layer_count)
    shared_ffn = config.integer("shared_expert_intermediate_size", default=5632)
    bias = config.flag("qkv_bias", default=True)
    windows = _windows(config, sizes.layer_count)
    dense_ffn = config.integer("intermediate_size", default=5632)
    planner = DecoderPlanner("qwen2_moe", checkpoint, config, sizes)
    for layer in range(sizes.layer_count):
        planner.attention(layer, bias=bias, window=windows[layer])
        if sparse[layer]:
            planner.moe_block(layer, moe, shared_ffn=shared_ffn)
        else:
            planner.dense_block(layer, dense_ffn)
    return planner.finish()


def _windows(config: ConfigReader, layer_count: int) -> list[int]:
    """Return the window of each layer, 0 for none: layer_types, else every other layer below max_window_layers."""
    slides = config.flag("use_sliding_window", default=False)
    window = config.integer("sliding_window", default=4096, minimum=0)
    limit = config.integer("max_window_layers", default=28, minimum=0)
    kinds = config.choices("layer_types", ("full_attention", "sliding_attention"), layer_count)
    if kinds is None:
        sliding = [slides and layer % 2 == 0 and layer < limit for layer in range(layer_count)]
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not (slides and window):
        raise UnsupportedModelError(
            f"{config.where}: sliding layers need use_sliding_window = true and a sliding_window of 1 or more."
        )
    return [window if slide else 0 for slide in sliding]
