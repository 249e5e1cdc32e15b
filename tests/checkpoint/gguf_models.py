"""Tiny models of every family as GGUF files, from the tensors of the same models as folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint.gguf_files import Raw, write_gguf
from families.tiny_folder import (
    DENSE,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    SHARED,
)

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "olmoe": "olmoe", "mixtral": "llama"}
_COMMON = {
    "block_count": 2, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": DENSE,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
    "expert_count": EXPERTS, "expert_used_count": 2,
}  # fmt: skip
_OWN = {
    "qwen3_moe": {"expert_feed_forward_length": FFN},
    "qwen2_moe": {"expert_feed_forward_length": FFN, "expert_shared_feed_forward_length": SHARED},
    "olmoe": {"feed_forward_length": FFN},
    "mixtral": {"feed_forward_length": FFN, "rope.dimension_count": HEAD_DIM},
}
_NAMES = (
    (r"model\.embed_tokens", "token_embd"), (r"model\.norm", "output_norm"), (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.", r"blk.\1."), (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"), (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.(q|k|v)(_proj)?(_norm)?\.", r"attn_\1\3."), (r"(mlp|block_sparse_moe)\.gate\.", "ffn_gate_inp."),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"), (r"mlp\.shared_expert\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
)  # fmt: skip
_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def metadata_of(family: str, **changes: Any) -> dict[str, Any]:
    """The keys of a file; names in `changes` have __ for the dot, and ... (Ellipsis) takes a key out."""
    metadata = _COMMON | _OWN[family] | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in metadata.items() if value is not ...}


def gguf_tensors(tensors: Mapping[str, np.ndarray], family: str, heads: tuple[int, int] = (HEADS, KV_HEADS)):
    """The tensors under the names, in the shapes and in the order of rows that a GGUF file has them."""
    result: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in tensors.items():
        expert = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
        if expert:
            stack = stacks.setdefault(f"blk.{expert[1]}.ffn_{_PARTS[expert[3]]}_exps.weight", [])
            assert len(stack) == int(expert[2])
            stack.append(array)
            continue
        new = name
        for pattern, replacement in _NAMES:
            new = re.sub(pattern, replacement, new)
        if new.endswith("ffn_gate_inp_shexp.weight"):
            array = array.reshape(-1)
        if family == "mixtral" and re.search(r"attn_[qk]\.weight", new):
            array = in_pairs(array, heads[0] if "attn_q" in new else heads[1])
        result[new] = array
    return result | {name: np.stack(stack) for name, stack in stacks.items()}


def in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows ordered for a RoPE that turns neighbours: row i of a half goes to row 2 i or 2 i + 1 of its head."""
    result = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            result[head * size + 2 * i] = rows[head * size + i]
            result[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return result


def write_model(
    path: Path,
    family: str,
    tensors: Mapping[str, np.ndarray],
    extra: Mapping[str, np.ndarray | Raw] = {},
    **changes: Any,
) -> Path:
    """Write the model of `tensors_of(family)` as a GGUF file; extra tensors go by their GGUF names."""
    stored = gguf_tensors(tensors, family)
    return write_gguf(path, ARCHITECTURES[family], metadata_of(family, **changes), {**stored, **extra})
