"""Writes tiny checkpoints of every family with NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, FFN, DENSE, SHARED, VOCABULARY = 24, 4, 2, 8, 6, 20, 28, 12, 40

_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_experts_per_tok": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "head_dim": HEAD_DIM,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": FFN, "intermediate_size": DENSE},
    "qwen2_moe": {
        "num_experts": EXPERTS, "moe_intermediate_size": FFN, "intermediate_size": DENSE,
        "shared_expert_intermediate_size": SHARED,
    },
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": FFN},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": FFN},
}  # fmt: skip
_BLOCKS = {"mixtral": "block_sparse_moe"}
_PARTS = {"mixtral": ("w1", "w3", "w2")}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of the family; a change to ... (Ellipsis) takes the key out."""
    config = {"model_type": family, **_COMMON, **CONFIGS[family], **changes}
    return {key: value for key, value in config.items() if value is not ...}


def tensors_of(
    family: str,
    *,
    layers: int = 2,
    dense: tuple[int, ...] = (),
    bias: bool | None = None,
    head: bool = True,
    fused: bool = False,
    head_dim: int = HEAD_DIM,
) -> dict[str, np.ndarray]:
    """Random tensors that fit `config_of`; `bias` defaults to what the family's class has."""
    random = np.random.default_rng(sum(map(ord, family)))
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    add("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        add(at + "input_layernorm.weight", HIDDEN)
        add(at + "post_attention_layernorm.weight", HIDDEN)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            add(f"{at}self_attn.{part}_proj.weight", rows, HIDDEN)
            if bias if bias is not None else family == "qwen2_moe":
                add(f"{at}self_attn.{part}_proj.bias", rows)
        add(at + "self_attn.o_proj.weight", HIDDEN, q)
        if bias and family in ("qwen3_moe", "olmoe"):
            add(at + "self_attn.o_proj.bias", HIDDEN)
        if family in ("qwen3_moe", "olmoe"):
            add(at + "self_attn.q_norm.weight", head_dim if family == "qwen3_moe" else q)
            add(at + "self_attn.k_norm.weight", head_dim if family == "qwen3_moe" else kv)
        block = f"{at}{_BLOCKS.get(family, 'mlp')}."
        if layer in dense:
            _add_mlp(add, block, DENSE)
            continue
        add(block + "gate.weight", EXPERTS, HIDDEN)
        gate, up, down = _PARTS.get(family, ("gate_proj", "up_proj", "down_proj"))
        for expert in range(EXPERTS):
            add(f"{block}experts.{expert}.{gate}.weight", FFN, HIDDEN)
            add(f"{block}experts.{expert}.{up}.weight", FFN, HIDDEN)
            add(f"{block}experts.{expert}.{down}.weight", HIDDEN, FFN)
        if fused:
            _fuse(tensors, f"{block}experts.", (gate, up, down))
        if family == "qwen2_moe":
            _add_mlp(add, block + "shared_expert.", SHARED)
            add(block + "shared_expert_gate.weight", 1, HIDDEN)
    add("model.norm.weight", HIDDEN)
    if head:
        add("lm_head.weight", VOCABULARY, HIDDEN)
    return tensors


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write config.json and model.safetensors; float32, float16, or bfloat16 given as uint16 bits."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, array in tensors.items():
        dtype = {"float32": "F32", "float16": "F16", "uint16": "BF16"}[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())
    return folder


def write_family(folder: Path, family: str, **changes: Any) -> Path:
    """Write a plain model of the family, with changes to its config.json."""
    return write_folder(folder, config_of(family, **changes), tensors_of(family))


def _add_mlp(add: Any, at: str, ffn: int) -> None:
    add(at + "gate_proj.weight", ffn, HIDDEN)
    add(at + "up_proj.weight", ffn, HIDDEN)
    add(at + "down_proj.weight", HIDDEN, ffn)


def _fuse(tensors: dict[str, np.ndarray], at: str, parts: tuple[str, str, str]) -> None:
    gate, up, down = ([tensors.pop(f"{at}{e}.{part}.weight") for e in range(EXPERTS)] for part in parts)
    tensors[at + "gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
    tensors[at + "down_proj"] = np.stack(down)
