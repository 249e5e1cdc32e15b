"""The numbers in config.json that every decoder family has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.families.config import ConfigReader


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes common to all layers; epsilon is that of every RMS norm."""

    vocabulary_size: int
    hidden_size: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float


@dataclass(frozen=True)
class Moe:
    """Router and experts of a layer.

    names: for gate, up and down of single experts. normalise: divide the chosen probabilities by their sum.
    """

    experts: int
    chosen: int
    ffn: int
    normalise: bool
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def read_sizes(config: ConfigReader, *, default_kv_heads: int | None, default_epsilon: float = 1e-6) -> DecoderSizes:
    """Read the sizes; head_dim absent or null is hidden_size / heads. default_kv_heads None means as many as heads."""
    hidden_size = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", maximum=65536)
    kv_heads = config.integer("num_key_value_heads", default=default_kv_heads or heads, maximum=65536)
    head_dim = config.integer("head_dim", default=hidden_size // heads, maximum=65536)
    if heads % kv_heads:
        raise CheckpointError(f"{config.where}: num_attention_heads must be a multiple of num_key_value_heads.")
    if head_dim % 2:
        raise UnsupportedModelError(f"{config.where}: head_dim {head_dim} is odd, so RoPE has no pairs.")
    config.only("hidden_act", "silu", "swish", default="silu")
    return DecoderSizes(
        vocabulary_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_count=config.integer("num_hidden_layers", maximum=4096),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        epsilon=config.number("rms_norm_eps", default=default_epsilon, above=0),
    )


def read_moe(config: ConfigReader, *, ffn_key: str, normalise: bool, names: Sequence[str] | None = None) -> Moe:
    """Read the router's numbers; the count of experts goes by two names in files of one and the same family."""
    experts = config.integer("num_experts", "num_local_experts", minimum=0, maximum=65536)
    chosen = config.integer("num_experts_per_tok", maximum=256)
    if experts and chosen > experts:
        raise CheckpointError(f"{config.where}: num_experts_per_tok = {chosen} is more than the {experts} experts.")
    moe = Moe(experts, chosen, config.integer(ffn_key), normalise)
    return moe if names is None else Moe(experts, chosen, moe.ffn, normalise, (names[0], names[1], names[2]))
