"""Tiny random models with a byte-level tokenizer, and a sampler that follows a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
    folder = path.with_suffix(".source")
    tensors = tensors_of("qwen3_moe")
    random = np.random.default_rng(5)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = (random.standard_normal((VOCABULARY, HIDDEN)) / 3).astype(np.float32)
    config = config_of("qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=context, eos_token_id=END)
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
