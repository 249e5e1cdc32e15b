"""Turns the metadata of a GGUF file into the configuration that Hugging Face writes for the same model.

What the metadata leaves to the architecture (whether chosen probabilities are normalised, whether the rows of q and k
are ordered in RoPE pairs) is that of llama.cpp, which defined the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from colibri.checkpoint.gguf_header import GgufTensor
from colibri.checkpoint.gguf_names import Naming
from colibri.errors import CheckpointError, UnsupportedModelError

_PROJECTIONS = Naming("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
_NUMBERED = Naming("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})

_REQUIRED = object()
# Keys without influence on the arithmetic.
_HARMLESS = {"rope.scaling.finetuned", "vocab_size", "expert_shared_count"}
# Harmless with these values alone.
_ONLY = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
}


class Metadata:
    """Typed access to the keys of one architecture that remembers what was read; `finish` refuses the rest."""

    def __init__(self, values: Mapping[str, Any], architecture: str, where: str) -> None:
        self.where = where
        self._values = values
        self._architecture = architecture
        self._read: set[str] = set()

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a value; one given for each layer must be the same for all."""
        full = f"{self._architecture}.{key}"
        self._read.add(full)
        if full not in self._values:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.where} has no {full}, which this architecture needs.")
            return default
        value = self._values[full]
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise UnsupportedModelError(f"{self.where}: {full} differs between layers, which is not supported.")
            return value[0]
        return value

    def refuse(self, key: str, value: Any) -> NoReturn:
        """Raise UnsupportedModelError for the value of a key."""
        raise UnsupportedModelError(f"{self.where}: {self._architecture}.{key} = {value!r} is not supported.")

    def finish(self) -> None:
        """Raise UnsupportedModelError naming keys of the architecture that nobody read and that could matter."""
        for key, allowed in _ONLY.items():
            value = self.value(key, allowed[0])
            if value not in allowed:
                self.refuse(key, value)
        known = self._read | {f"{self._architecture}.{key}" for key in _HARMLESS}
        prefix = f"{self._architecture}."
        unknown = sorted(key for key in self._values if key.startswith(prefix) and key not in known)
        if unknown:
            listed = ", ".join(f"{key} = {self._values[key]!r}" for key in unknown[:10])
            raise UnsupportedModelError(
                f"{self.where} has keys that are not known here and that could change the result: {listed}."
            )


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`. paired_rows: q and k are stored for a RoPE that turns neighbouring values."""

    naming: Naming
    paired_rows: bool
    config: Callable[[Metadata, Mapping[str, GgufTensor]], dict[str, Any]]


def config_of(
    architecture: str, metadata: Metadata, tensors: Mapping[str, GgufTensor], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """Return config.json for the model.

    rope_factors: the values of rope_freqs.weight, float32 [head_dim / 2], or None. Raises CheckpointError for a key
    that is missing and UnsupportedModelError for one that could change the arithmetic, naming it.
    """
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{metadata.where} has no tensor token_embd.weight; it is not a whole language model.")
    heads, hidden_size = metadata.value("attention.head_count"), metadata.value("embedding_length")
    if not _counts(heads, hidden_size):
        raise CheckpointError(f"{metadata.where}: head_count and embedding_length should be whole numbers above 0.")
    head_dim = metadata.value("attention.key_length", hidden_size // heads)
    if not _counts(head_dim):
        metadata.refuse("attention.key_length", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := metadata.value(key, head_dim)) != head_dim:
            metadata.refuse(key, value)
    config = {
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.value("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.value("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, rope_factors),
        "max_position_embeddings": metadata.value("context_length"),
        "vocab_size": embedding.shape[0],
        "num_experts_per_tok": metadata.value("expert_used_count", 0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    config |= ARCHITECTURES[architecture].config(metadata, tensors)
    metadata.finish()
    return config


def _rope_scaling(metadata: Metadata, rope_factors: np.ndarray | None) -> dict[str, Any] | None:
    kind = metadata.value("rope.scaling.type", "linear")
    factor = metadata.value("rope.scaling.factor", metadata.value("rope.scale_linear", 1.0)) or 1.0
    original = metadata.value("rope.scaling.original_context_length", None)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if (value := metadata.value(f"rope.scaling.{key}", 1.0)) != 1:
            metadata.refuse(f"rope.scaling.{key}", value)
    beta_fast = metadata.value("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = metadata.value("rope.scaling.yarn_beta_slow", 1.0)
    scaled = kind != "none" and factor != 1
    if kind not in ("none", "linear", "yarn"):
        metadata.refuse("rope.scaling.type", kind)
    if rope_factors is not None and (rope_factors != 1).any():
        if scaled:
            raise UnsupportedModelError(f"{metadata.where} has both rope_freqs.weight and RoPE scaling of type {kind}.")
        return {"rope_type": "factors", "factors": rope_factors.tolist()}
    if not scaled:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling = {"rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow}
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _expert_width(metadata: Metadata) -> int:
    """Return expert_feed_forward_length; files that lack it share feed_forward_length out among the chosen experts."""
    total, chosen = metadata.value("feed_forward_length", 0), metadata.value("expert_used_count", 1)
    return metadata.value("expert_feed_forward_length", total // chosen if _counts(total, chosen) else 0)


def _qwen(metadata: Metadata, tensors: Mapping[str, GgufTensor], model_type: str, normalise: bool) -> dict[str, Any]:
    layers = metadata.value("block_count")
    dense = [
        layer
        for layer in range(layers if _counts(layers) and layers <= len(tensors) else 0)
        if f"blk.{layer}.ffn_gate.weight" in tensors and f"blk.{layer}.ffn_gate_inp.weight" not in tensors
    ]
    _no_window(metadata)
    config = {
        "model_type": model_type,
        "num_experts": metadata.value("expert_count"),
        "moe_intermediate_size": _expert_width(metadata),
        "norm_topk_prob": metadata.value("expert_weights_norm", normalise),
        "mlp_only_layers": dense,
    }
    return config | ({"intermediate_size": metadata.value("feed_forward_length")} if dense else {})


def _qwen3_moe(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    return _qwen(metadata, tensors, "qwen3_moe", True) | {"attention_bias": "blk.0.attn_q.bias" in tensors}


def _qwen2_moe(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    width = metadata.value("feed_forward_length", None)
    shared = metadata.value("expert_shared_feed_forward_length", width)
    config = _qwen(metadata, tensors, "qwen2_moe", False) | {"qkv_bias": "blk.0.attn_q.bias" in tensors}
    return config | {"shared_expert_intermediate_size": shared}


def _olmoe(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    _no_window(metadata)
    return {
        "model_type": "olmoe",
        "num_experts": metadata.value("expert_count"),
        "intermediate_size": metadata.value("expert_feed_forward_length", metadata.value("feed_forward_length", 0)),
        "norm_topk_prob": metadata.value("expert_weights_norm", False),
        "clip_qkv": metadata.value("attention.clamp_kqv", 0) or None,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


def _llama(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    if not metadata.value("expert_count", 0):
        raise UnsupportedModelError(
            f"{metadata.where}: architecture 'llama' without experts is not supported, only Mixtral is."
        )
    if not metadata.value("expert_weights_norm", True):
        metadata.refuse("expert_weights_norm", False)
    return {
        "model_type": "mixtral",
        "num_local_experts": metadata.value("expert_count"),
        "intermediate_size": metadata.value("expert_feed_forward_length", metadata.value("feed_forward_length", 0)),
        "sliding_window": metadata.value("attention.sliding_window", 0) or None,
    }


def _no_window(metadata: Metadata) -> None:
    window, context = metadata.value("attention.sliding_window", 0), metadata.value("context_length")
    # Which layers slide is not in the file; where none can, it does not matter.
    if window and not (_counts(window, context) and window >= context):
        metadata.refuse("attention.sliding_window", window)


def _counts(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_NUMBERED, True, _llama),
    "olmoe": Architecture(_PROJECTIONS, False, _olmoe),
    "qwen2moe": Architecture(_PROJECTIONS, False, _qwen2_moe),
    "qwen3moe": Architecture(_PROJECTIONS, False, _qwen3_moe),
}
