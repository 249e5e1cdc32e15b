"""Builds a tokenizer from the metadata of a GGUF file: vocabulary, merges or scores, and the name of the rules.

The metadata only names how text is split before merging. The rules of a name are those of the Hugging Face tokenizers
that carry it (including their Unicode normalisation, which other readers of these files leave out), so that token ids
are those the model was trained with; `default`, which no such tokenizer has, is what llama.cpp does for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from colibri.errors import TokenizerError
from colibri.tokenizer.folder import TokenizerParts
from colibri.tokenizer.loading import load_tokenizer
from colibri.tokenizer.scored import scored_model

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED_IDS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}  # fmt: skip
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPLATE = "tokenizer.chat_template"


class _Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Rules:
    """patterns split the text one after another; begins: a BOS token comes first unless the metadata says otherwise."""

    patterns: Sequence[str]
    normalised: bool = False
    ignore_merges: bool = False
    begins: bool = False


_LLAMA3 = _Rules((_CASELESS % r"\p{N}{1,3}",), ignore_merges=True, begins=True)
_RULES = {
    "default": _Rules(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "gpt-2": _Rules((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "olmo": _Rules((_GPT2,), normalised=True),
    "qwen2": _Rules((_CASELESS % r"\p{N}",), normalised=True),
}


@dataclass(frozen=True)
class _Vocabulary:
    """ids: by text, of all tokens in use. normal: those that text is merged to. added: those found before all else."""

    tokens: list[str]
    ids: dict[str, int] = field(default_factory=dict)
    normal: set[int] = field(default_factory=set)
    added: list[tuple[int, _Kind]] = field(default_factory=list)


def read_tokenizer_metadata(metadata: Mapping[str, Any], source: str) -> TokenizerParts | None:
    """Return the tokenizer in the keys `tokenizer.*` of a GGUF file, or None when it has no vocabulary.

    Raises TokenizerError naming `source` and the key that is missing or malformed, or the kind of tokenizer or rules
    that is not known.
    """
    reader = _Reader(metadata, source)
    model = reader.get("tokenizer.ggml.model", str)
    if model is None or model in ("no_vocab", "none"):
        return None
    if model == "gpt2":
        vocabulary = _vocabulary(reader, source)
        name, rules = _rules(reader, source)
        begins = rules.begins
        parts = _byte_level(vocabulary, reader.list("tokenizer.ggml.merges", str), rules, f"{source} ({name})")
    elif model == "llama":
        vocabulary, begins = _vocabulary(reader, source), True
        prefix = reader.get("tokenizer.ggml.add_space_prefix", bool)
        parts = scored_model(
            vocabulary.tokens, vocabulary.ids, vocabulary.normal, reader.list("tokenizer.ggml.scores", float), source,
            unknown=reader.token("unknown_token_id", vocabulary.tokens), prefix=prefix is not False,
        )  # fmt: skip
    else:
        raise TokenizerError(
            f"{source}: tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama' are; "
            "convert the Hugging Face folder instead."
        )
    named = {name: reader.token(key, vocabulary.tokens) for name, key in _NAMED_IDS.items()}
    special_tokens = {name: text for name, text in named.items() if text is not None}
    document = parts | {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(id, kind, vocabulary.tokens) for id, kind in vocabulary.added],
        "post_processor": _post_processor(reader, special_tokens, vocabulary, begins),
    }
    tokenizer = load_tokenizer(json.dumps(document).encode(), source)
    for id, _ in vocabulary.added:
        if tokenizer.token_to_id(vocabulary.tokens[id]) != id:
            raise TokenizerError(f"{source}: token {vocabulary.tokens[id]!r} did not keep its id {id}.")
    stops = {id for key in _STOPS if (id := reader.id(key, vocabulary.tokens)) is not None}
    extra = {
        key.removeprefix(f"{_TEMPLATE}."): text for key, text in metadata.items() if key.startswith(f"{_TEMPLATE}.")
    }
    if not all(isinstance(text, str) for text in extra.values()):
        raise TokenizerError(f"{source}: a chat template is not text.")
    settings = {
        "special_tokens": special_tokens,
        "stop_token_ids": sorted(stops),
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "extra_chat_templates": extra,
    }
    return TokenizerParts(tokenizer.to_str().encode(), reader.get(_TEMPLATE, str), settings)


class _Reader:
    """Typed access to the metadata; raises TokenizerError naming the key."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def get(self, key: str, type: type) -> Any:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, type):
            raise TokenizerError(f"{self._source}: {key} should be of type {type.__name__}.")
        return value

    def list(self, key: str, type: type) -> list[Any]:
        values = self._metadata.get(key)
        if not isinstance(values, list) or not all(isinstance(value, type) for value in values):
            raise TokenizerError(f"{self._source} has no {key}, a list which this tokenizer needs.")
        return values

    def id(self, key: str, tokens: Sequence[str]) -> int | None:
        """The id under `tokenizer.ggml.{key}`; 2^32 - 1 is how files say that there is none."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value in (None, 0xFFFFFFFF, -1):
            return None
        if type(value) is not int or not 0 <= value < len(tokens):
            raise TokenizerError(f"{self._source}: tokenizer.ggml.{key} = {value!r} is not the id of a token.")
        return value

    def token(self, key: str, tokens: Sequence[str]) -> str | None:
        id = self.id(key, tokens)
        return None if id is None else tokens[id]


def _rules(reader: _Reader, source: str) -> tuple[str, _Rules]:
    name = reader.get("tokenizer.ggml.pre", str)
    # Early converters did not write the name.
    name = "default" if name is None else name
    if name not in _RULES:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.pre = {name!r} is not supported, only {', '.join(_RULES)}; "
            "convert the Hugging Face folder instead."
        )
    return name, _RULES[name]


def _vocabulary(reader: _Reader, source: str) -> _Vocabulary:
    tokens = reader.list("tokenizer.ggml.tokens", str)
    kinds = [_Kind.NORMAL] * len(tokens)
    numbers = reader.list("tokenizer.ggml.token_type", int) if reader.get("tokenizer.ggml.token_type", list) else kinds
    if len(numbers) != len(tokens):
        raise TokenizerError(f"{source} has {len(tokens)} tokens and {len(numbers)} token types.")
    vocabulary = _Vocabulary(tokens)
    for id, (text, number) in enumerate(zip(tokens, numbers, strict=True)):
        if number not in _Kind.__members__.values():
            raise TokenizerError(f"{source}: token {id} has the unknown token type {number}.")
        kind = _Kind(number)
        if kind is _Kind.UNUSED:
            # Rows of the embedding that have no token, under names that were made up for the file.
            continue
        if text in vocabulary.ids:
            raise TokenizerError(f"{source}: token {text[:100]!r} has the ids {vocabulary.ids[text]} and {id}.")
        vocabulary.ids[text] = id
        if kind is _Kind.NORMAL:
            vocabulary.normal.add(id)
        elif kind is not _Kind.BYTE:
            vocabulary.added.append((id, kind))
    return vocabulary


def _byte_level(vocabulary: _Vocabulary, merges: Sequence[str], rules: _Rules, source: str) -> dict[str, Any]:
    pairs = []
    for merge in merges:
        # The first character may itself be a blank.
        at = merge.find(" ", 1)
        if at < 0 or at == len(merge) - 1:
            raise TokenizerError(f"{source}: the merge {merge[:100]!r} is not two parts with a blank between them.")
        pairs.append([merge[:at], merge[at + 1 :]])
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rules.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if rules.normalised else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rules.ignore_merges,
            "vocab": vocabulary.ids,
            "merges": pairs,
        },
    }


def _added_token(id: int, kind: _Kind, tokens: Sequence[str]) -> dict[str, Any]:
    return {
        "id": id,
        "content": tokens[id],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind is not _Kind.USER_DEFINED,
    }


def _post_processor(
    reader: _Reader, special_tokens: Mapping[str, str], vocabulary: _Vocabulary, begins: bool
) -> dict[str, Any] | None:
    add_bos, add_eos = (reader.get(f"tokenizer.ggml.add_{name}_token", bool) for name in ("bos", "eos"))
    add_bos = begins if add_bos is None else add_bos
    before = [special_tokens["bos_token"]] if add_bos and "bos_token" in special_tokens else []
    after = [special_tokens["eos_token"]] if add_eos and "eos_token" in special_tokens else []
    if not before and not after:
        return None

    def tokens(texts: Sequence[str], type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": text, "type_id": type_id}} for text in texts]

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        here = [{"Sequence": {"id": name, "type_id": type_id}}]
        return [*tokens(before, type_id), *here, *tokens(after, type_id)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]} for text in (*before, *after)
        },
    }
