"""The models of the parity tests: for every family, both values of every flag it reads."""

from __future__ import annotations

import torch
from parity.tiny_models import REMOVED, ROPES, TinyCase

WINDOW = 7  # much shorter than the text


def _shared(family: str) -> list[TinyCase]:
    """What every family reads."""

    def case(name: str, options: dict | None = None, **rest: object) -> TinyCase:
        return TinyCase(name, family, options or {}, **rest)  # type: ignore[arg-type]

    return [
        case("plain"),
        case("tied", {"tie_word_embeddings": True}),
        case("tied-with-head", {"tie_word_embeddings": True}, head="added", oracle_reads_folder=False),
        case("head-is-embedding-plus-one", head="shifted"),
        case("one-kv-head", {"num_key_value_heads": 1}),
        case("kv-heads-equal-heads", {"num_key_value_heads": 4}),
        case("large-epsilon", {"rms_norm_eps": 0.1}),
        case("top-1", {"num_experts_per_tok": 1}),
        case("theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        # head_dim is written out: with null, transformers cannot compute YaRN for Mixtral.
        *(case(f"rope-{name}", {"rope_parameters": rope, "head_dim": 16}) for name, rope in ROPES.items()),
        case("rope-old-keys", stored={"rope_parameters": REMOVED, "rope_theta": 500.0, "rope_scaling": None}),
        case(
            "rope-old-linear",
            stored={
                "rope_parameters": REMOVED,
                "rope_theta": 500.0,
                "rope_scaling": {"type": "linear", "factor": 3.0},
            },
        ),
        case("sharded", saving={"max_shard_size": "50KB"}),
        case("fused-experts", saving={"save_original_format": False}),
        case("bf16", dtype=torch.bfloat16),
        case("f16", dtype=torch.float16),
    ]


def _norm_topk(family: str) -> list[TinyCase]:
    return [
        TinyCase("norm-topk", family, {"norm_topk_prob": True}),
        TinyCase("no-norm-topk", family, {"norm_topk_prob": False}),
        TinyCase("norm-topk-absent", family, {"norm_topk_prob": False}, stored={"norm_topk_prob": REMOVED}),
    ]


def _dense_layers(family: str) -> list[TinyCase]:
    return [
        # Only layer 3 is sparse: a list with 0 would test nothing, the step makes layer 0 dense already.
        TinyCase("dense-by-list-and-step", family, _dense(4, [1], 2)),
        TinyCase("dense-by-list", family, _dense(3, [0, 2], 1)),
        TinyCase("dense-by-step", family, _dense(3, [], 2)),
        TinyCase("dense-list-null", family, stored={"mlp_only_layers": None}),
    ]


def _dense(layers: int, only: list[int], step: int) -> dict:
    return {"num_hidden_layers": layers, "mlp_only_layers": only, "decoder_sparse_step": step}


QWEN3_MOE = [
    *_shared("qwen3_moe"),
    *_norm_topk("qwen3_moe"),
    *_dense_layers("qwen3_moe"),
    TinyCase("attention-bias", "qwen3_moe", {"attention_bias": True}),
    TinyCase("head-dim-absent", "qwen3_moe", {"head_dim": 16}, stored={"head_dim": REMOVED}),
    TinyCase("head-dim-null", "qwen3_moe", {"head_dim": 16}, stored={"head_dim": None}, oracle_reads_folder=False),
    TinyCase("window", "qwen3_moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
    TinyCase("window-unused", "qwen3_moe", stored={"use_sliding_window": False, "sliding_window": WINDOW}),
    TinyCase("num-experts-key", "qwen3_moe", stored={"num_local_experts": REMOVED, "num_experts": 12}),
]

QWEN2_MOE = [
    *_shared("qwen2_moe"),
    *_norm_topk("qwen2_moe"),
    *_dense_layers("qwen2_moe"),
    TinyCase("no-qkv-bias", "qwen2_moe", {"qkv_bias": False}),
    TinyCase("qkv-bias-absent", "qwen2_moe", stored={"qkv_bias": REMOVED}),
    TinyCase(
        "window-in-layers-0-and-2",
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    ),
    TinyCase(
        "window-by-old-keys",
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        stored={"layer_types": REMOVED},
    ),
    TinyCase(
        "window-by-layer-types",
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    TinyCase("window-unused", "qwen2_moe", stored={"use_sliding_window": False, "sliding_window": WINDOW}),
]

MIXTRAL = [
    *_shared("mixtral"),
    TinyCase("head-dim", "mixtral", {"head_dim": 32}),
    TinyCase("head-dim-absent", "mixtral", stored={"head_dim": REMOVED}),
    TinyCase("window", "mixtral", {"sliding_window": WINDOW}),
    TinyCase("theta-absent", "mixtral", stored={"rope_parameters": REMOVED}),
]

OLMOE = [
    *_shared("olmoe"),
    *_norm_topk("olmoe"),
    TinyCase("clip", "olmoe", {"clip_qkv": 0.5}),
    TinyCase("clip-absent", "olmoe", stored={"clip_qkv": REMOVED}),
    TinyCase("attention-bias", "olmoe", {"attention_bias": True}),
    TinyCase("clip-with-bias", "olmoe", {"attention_bias": True, "clip_qkv": 0.5}),
]

ALL = [*QWEN3_MOE, *QWEN2_MOE, *MIXTRAL, *OLMOE]

# Each pair: a case, and keys of its config.json that change the arithmetic but no tensor. A converter that ignored
# the key would pass no test if the logits did not move.
FLIPS: list[tuple[TinyCase, dict]] = [
    (TinyCase("flip-norm-topk", "qwen3_moe"), {"norm_topk_prob": False}),
    (TinyCase("flip-top-k", "qwen3_moe"), {"num_experts_per_tok": 2}),
    (TinyCase("flip-window", "qwen3_moe"), {"use_sliding_window": True, "sliding_window": WINDOW}),
    (TinyCase("flip-theta", "qwen3_moe"), {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    (TinyCase("flip-epsilon", "qwen3_moe"), {"rms_norm_eps": 0.1}),
    (TinyCase("flip-linear", "qwen3_moe"), {"rope_parameters": ROPES["linear"]}),
    (TinyCase("flip-llama3", "qwen3_moe"), {"rope_parameters": ROPES["llama3"]}),
    (TinyCase("flip-yarn", "qwen3_moe"), {"rope_parameters": ROPES["yarn"]}),
    (
        TinyCase("flip-yarn-factors", "qwen3_moe", {"rope_parameters": ROPES["yarn-factors"]}),
        {"rope_parameters": {**ROPES["yarn-factors"], "truncate": True}},
    ),
    (
        TinyCase("flip-attention-factor", "qwen3_moe", {"rope_parameters": ROPES["yarn-factors"]}),
        {"rope_parameters": {**ROPES["yarn-factors"], "attention_factor": 1.0}},
    ),
    (TinyCase("flip-norm-topk", "qwen2_moe"), {"norm_topk_prob": True}),
    (
        TinyCase("flip-layer-types", "qwen2_moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    ),
    (TinyCase("flip-window", "mixtral"), {"sliding_window": WINDOW}),
    (TinyCase("flip-top-k", "mixtral"), {"num_experts_per_tok": 2}),
    (TinyCase("flip-norm-topk", "olmoe"), {"norm_topk_prob": True}),
    (TinyCase("flip-clip", "olmoe"), {"clip_qkv": 0.5}),
    (TinyCase("flip-clip-off", "olmoe", {"clip_qkv": 0.5}), {"clip_qkv": None}),
]
