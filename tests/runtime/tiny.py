"""Tiny random models with a byte-level tokenizer, and a sampler that follows a script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from families.tiny_folder import HIDDEN, config_of, tensors_of, write_folder
from tokenizers import decoders, models, pre_tokenizers

import colibri
from colibri.runtime.sampling import Sample

END, GAP, VOCABULARY = 256, 257, 300
"""The token that ends a text; an id without a token; rows of the head, more than the tokenizer's 259 ids."""

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages, please') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_ids(text: str | bytes) -> list[int]:
    """The ids of a text, one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    data = text.encode() if isinstance(text, str) else text
    return [alphabet.index(_character_of_byte(byte)) for byte in data]


def _character_of_byte(byte: int) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(1 for other in range(byte) if other not in printable))


def write_tiny(
    path: Path, weights: str = "f32", *, tokenizer: bool = True, template: str | None = TEMPLATE, context: int = 256
) -> Path:
    """Convert a random Qwen3-MoE of two layers into `path`."""
    tensors = tensors_of("qwen3_moe")
    random = np.random.default_rng(5)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = (random.standard_normal((VOCABULARY, HIDDEN)) / 3).astype(np.float32)
    config = config_of("qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=context, eos_token_id=END)
    return _convert(path, config, tensors, weights, tokenizer=tokenizer, template=template)


def _convert(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    weights: str,
    *,
    tokenizer: bool = True,
    template: str | None,
) -> Path:
    folder = path.with_suffix(".source")
    write_folder(folder, config, tensors)
    if tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])} | {"<after gap>": GAP + 1}
        made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<end>"])
        made.save(str(folder / "tokenizer.json"))
        settings = {"eos_token": "<end>"} | ({} if template is None else {"chat_template": template})
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    colibri.convert(folder, path, weights=weights)
    return path


class ScriptedSampler:
    """In the place of `Engine.sampler`: gives the ids of a script, whatever the logits."""

    def __init__(self, ids: Sequence[int]):
        self._ids = list(ids)

    def sample(self, *_arguments: object) -> Sample:
        return Sample(self._ids.pop(0), -1.0, ())


def scripted(engine: colibri.Engine, ids: Sequence[int]) -> colibri.Engine:
    """Let the engine "generate" these ids."""
    engine.__dict__["sampler"] = ScriptedSampler(ids)
    return engine


def write_larger(path: Path) -> Path:
    """A random Qwen3-MoE with 96 MiB of experts, in q4, with the tiny tokenizer."""
    width, ffn, experts, layers, vocabulary = 512, 512, 64, 4, 8192
    random = np.random.default_rng(6)
    config = config_of(
        "qwen3_moe", vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, num_experts=experts, num_experts_per_tok=4, moe_intermediate_size=ffn,
        max_position_embeddings=4096, eos_token_id=END,
    )  # fmt: skip
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    shapes["model.norm.weight"] = (width,)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{name}_norm.weight": (64,) for name in "qk"}
        shapes |= {
            f"{at}self_attn.{name}_proj.weight": (rows, width)
            for name, rows in (("q", 512), ("k", 256), ("v", 256), ("o", 512))
        }
        shapes[f"{at}mlp.gate.weight"] = (experts, width)
        for expert in range(experts):
            here = f"{at}mlp.experts.{expert}."
            shapes |= {f"{here}{name}_proj.weight": (ffn, width) for name in ("gate", "up")}
            shapes[f"{here}down_proj.weight"] = (width, ffn)
    tensors = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        tensors[name] = values + 1 if len(shape) == 1 else values
    return _convert(path, config, tensors, "q4", template=TEMPLATE)
