"""Tiny random models in the Hugging Face layout, whose logits move when a rule of the arithmetic is wrong.

The default initialisation of transformers (std 0.02) hides faults: a wrong router rule moves its logits by less than
some tolerances. Here matrices have std 1 / sqrt(fan in), norm weights 1 + 0.2 N and biases 0.3 N. Sizes are odd on
purpose (no multiple of a tile, a block or a group), heads share keys, and there are four times more experts than a
token uses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

REMOVED = "<removed>"
"""As a value of `TinyCase.stored`: the key is taken out of config.json."""

TOKEN_COUNT = 72  # beyond one block of 64 positions of the attention state

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 12, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 12, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 12},
    "olmoe": {"num_experts": 12},
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    },
    "yarn-factors": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


@dataclass(frozen=True)
class TinyCase:
    """One model: `options` go to the transformers config, `stored` replaces keys of the written config.json.

    `head` puts an lm_head of embedding + 1 beside a tied embedding ("added"), into an untied model ("shifted"), or
    takes it away ("removed"). `oracle_reads_folder` is False where transformers cannot open what is stored.
    `saving` are arguments of save_pretrained; `dtype` is that of the checkpoint.
    """

    name: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=dict)
    head: str = ""
    saving: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    oracle_reads_folder: bool = True

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


@dataclass(frozen=True)
class Expected:
    """What transformers computes: logits float32 [n, vocabulary]; experts, by layer, int64 [n, chosen], best first."""

    tokens: list[int]
    logits: np.ndarray
    experts: dict[int, np.ndarray]


def build(case: TinyCase, folder: Path) -> Expected:
    """Write the checkpoint of `case` to `folder` and compute what it should give."""
    options = {**_COMMON, **FAMILIES[case.family], **case.options}
    config = AutoConfig.for_model(case.family, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    seed = sum(map(ord, str(case)))
    _randomise(model, seed)
    if case.head == "shifted":
        with torch.no_grad():
            model.lm_head.weight.copy_(model.get_input_embeddings().weight + 1)
    model.to(case.dtype).save_pretrained(folder, **case.saving)
    _edit_config(folder, case.stored)
    if case.head in ("added", "removed"):
        _edit_head(folder, case.head)
    if case.oracle_reads_folder:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, TOKEN_COUNT).tolist()
    return expected_of(model.float(), tokens)


def expected_of(model: Any, tokens: list[int]) -> Expected:
    """Run a transformers model over `tokens` at once, noting what each router chooses."""
    experts: dict[int, np.ndarray] = {}
    hooks = []
    for layer, block in enumerate(model.model.layers):
        for module in block.modules():
            if type(module).__name__.endswith("TopKRouter"):

                def note(_module: Any, _inputs: Any, outputs: Any, layer: int = layer) -> None:
                    experts[layer] = outputs[2].numpy()

                hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return Expected(tokens, logits, experts)


def _randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))


def _edit_config(folder: Path, stored: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in stored.items():
        if value == REMOVED:
            config.pop(key)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def _edit_head(folder: Path, head: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if head == "added":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    else:
        del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
