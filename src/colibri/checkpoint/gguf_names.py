"""The names of tensors in GGUF files and in Hugging Face folders, which the families know.

A GGUF file holds the experts of a layer in one tensor [experts, rows, cols]; here each gets the name that single
experts have in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from colibri.checkpoint.gguf_header import GgufTensor
from colibri.checkpoint.strict_json import quoted
from colibri.errors import CheckpointError

# Twice what the largest models have: a small file could claim any number of experts of a few bytes.
MAXIMUM_PLACED = 1 << 17
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    **{f"{old}.{kind}": f"self_attn.{new}.{kind}" for old, new in _ATTENTION.items() for kind in ("weight", "bias")},
}
_BLOCK = {
    "ffn_gate_inp.weight": "gate.weight",
    "ffn_gate_inp_shexp.weight": "shared_expert_gate.weight",
    **{f"ffn_{part}.weight": f"{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp.weight": f"shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
}
# Tables that files of early converters hold and every implementation computes itself.
_HARMLESS = re.compile(r"blk\.\d+\.attn_rot_embd|rope_freqs\.weight")
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_STACKED = re.compile(r"ffn_(gate|up|down)_exps\.weight")
_SINGLE = re.compile(r"ffn_(gate|up|down)\.(\d{1,6})\.weight")


@dataclass(frozen=True)
class Naming:
    """How a family calls the feed-forward block of a layer and the matrices of a single expert."""

    block: str
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor under its Hugging Face name: the whole GGUF tensor, or one expert of it.

    label: the GGUF name, for messages. first_row counts rows of all but the last axis. head_rows > 0: in each run of
    that many rows, the two halves of every RoPE pair are neighbours.
    """

    label: str
    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0
    head_rows: int = 0


def place_tensors(
    tensors: Mapping[str, GgufTensor], naming: Naming, head_rows: int, where: str
) -> dict[str, PlacedTensor]:
    """Return each tensor under its Hugging Face name; one of an unknown name keeps it, so that it will be refused.

    head_rows: the head dimension where the rows of q and k are ordered in pairs, else 0. where: the file, for errors.
    Raises CheckpointError for two tensors of one meaning and for more than MAXIMUM_PLACED.
    """
    placed: dict[str, PlacedTensor] = {}
    for name, tensor in _placed(tensors, naming, head_rows):
        if name in placed:
            raise CheckpointError(f"{where}: tensor {quoted(tensor.label)} is there in two forms; one is too many.")
        if len(placed) == MAXIMUM_PLACED:
            raise CheckpointError(f"{where} has more than {MAXIMUM_PLACED} tensors and experts, up to {tensor.label}.")
        placed[name] = tensor
    return placed


def _placed(tensors: Mapping[str, GgufTensor], naming: Naming, head_rows: int) -> Iterator[tuple[str, PlacedTensor]]:
    for name, tensor in tensors.items():
        layer = _IN_LAYER.fullmatch(name)
        if _HARMLESS.fullmatch(name):
            continue
        if layer is None:
            yield _TOP.get(name, name), PlacedTensor(name, tensor, tensor.shape)
            continue
        there, rest = f"model.layers.{int(layer[1])}.", layer[2]
        stacked, single = _STACKED.fullmatch(rest), _SINGLE.fullmatch(rest)
        experts = f"{there}{naming.block}.experts."
        if stacked and len(tensor.shape) == 3:
            count, rows, cols = tensor.shape
            for expert in range(count):
                placed = PlacedTensor(f"{name}[{expert}]", tensor, (rows, cols), expert * rows)
                yield f"{experts}{expert}.{naming.parts[stacked[1]]}.weight", placed
        elif single:
            placed = PlacedTensor(name, tensor, tensor.shape)
            yield f"{experts}{int(single[2])}.{naming.parts[single[1]]}.weight", placed
        elif rest in _BLOCK:
            # The gate of the shared expert is a matrix of one row, stored as a vector.
            row = rest == "ffn_gate_inp_shexp.weight" and len(tensor.shape) == 1
            shape = (1, *tensor.shape) if row else tensor.shape
            yield f"{there}{naming.block}.{_BLOCK[rest]}", PlacedTensor(name, tensor, shape)
        elif rest in _LAYER:
            paired = head_rows if rest in ("attn_q.weight", "attn_k.weight") else 0
            yield there + _LAYER[rest], PlacedTensor(name, tensor, tensor.shape, head_rows=paired)
        else:
            yield name, PlacedTensor(name, tensor, tensor.shape)


def gguf_name(name: str, naming: Naming) -> str:
    """Return what a GGUF file calls a tensor of this Hugging Face name, or the name itself where it has none."""
    top = {new: old for old, new in _TOP.items()}
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return top.get(name, name)
    at, rest = f"blk.{match[1]}.", match[2]
    names = {new: old for old, new in _LAYER.items()} | {f"{naming.block}.{new}": old for old, new in _BLOCK.items()}
    if rest in names:
        return at + names[rest]
    expert = re.fullmatch(rf"{re.escape(naming.block)}\.experts\.(\d+)\.(\w+)\.weight", rest)
    parts = {new: old for old, new in naming.parts.items()}
    if expert and expert[2] in parts:
        return f"{at}ffn_{parts[expert[2]]}_exps.weight[{expert[1]}]"
    return name
