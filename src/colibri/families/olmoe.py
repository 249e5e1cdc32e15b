"""OLMoE: RMS norm over the whole query and key vectors, then clipping of q, k and v, then rotation.

Rules from transformers' OlmoeConfig and modeling_olmoe.
"""

from __future__ import annotations

from colibri.checkpoint import Checkpoint
from colibri.families.config import ConfigReader
from colibri.families.decoder import DecoderPlanner
from colibri.families.plan import ModelPlan
from colibri.families.sizes import read_moe, read_sizes

ARCHITECTURES = ("OlmoeForCausalLM",)


def plan(checkpoint: Checkpoint) -> ModelPlan:
    """Return the plan; raises UnsupportedModelError or CheckpointError, naming the key or tensor."""
    config = ConfigReader(checkpoint)
    sizes = read_sizes(config, default_kv_heads=None, default_epsilon=1e-5)
    moe = read_moe(config, ffn_key="intermediate_size", normalise=config.flag("norm_topk_prob", default=False))
    bias = config.flag("attention_bias", default=False)
    clip = config.optional_number("clip_qkv", above=0)
    planner = DecoderPlanner("olmoe", checkpoint, config, sizes)
    for layer in range(sizes.layer_count):
        planner.attention(layer, bias=bias, output_bias=bias, norm="whole", clip=clip)
        planner.moe_block(layer, moe)
    return planner.finish()
