"""Small tokenizers of the kinds that language models use, written as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from colibri.tokenizer import Tokenizer, read_tokenizer_folder

DEMO = Path(__file__).parents[2] / "demo"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_TOKENS = ("<unk>", "<s>", "</s>")


def special(text: str, **flags: Any) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=True, normalized=False, **flags)


def byte_level() -> tokenizers.Tokenizer:
    """The 256 bytes, a few merges, three ChatML tokens and one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("i", "m"), ("<", "|")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special(text) for text in CHATML_TOKENS])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>"), tokenizers.AddedToken("   ", normalized=False)])
    return tokenizer


def _sentencepiece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges = [("H", "i"), ("▁", "Hi"), ("▁", "x"), ("o", "w"), ("h", "ow"), ("▁", "how"), ("<", "s"), ("<s", ">")]
    pieces = [*LLAMA_TOKENS, *(f"<0x{value:02X}>" for value in range(256))]
    pieces += ["▁", *"Hixhowsare<>/|[]INST.,'n"]
    for token in ("".join(pair) for pair in merges):
        pieces.append(token)
    return {token: index for index, token in enumerate(dict.fromkeys(pieces))}, merges


def sentencepiece(prepend_bos: bool = True) -> tokenizers.Tokenizer:
    """Llama-like: blank marks put in by the normaliser, byte fallback; plain text can even be merged to `<s>`."""
    vocabulary, merges = _sentencepiece_vocabulary()
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([special(text) for text in LLAMA_TOKENS])
    if prepend_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def metaspace(scheme: str = "first") -> tokenizers.Tokenizer:
    """As newer conversions of SentencePiece models write it: Metaspace on both sides, a unigram model."""
    vocabulary, _ = _sentencepiece_vocabulary()
    scores = [(token, -float(index % 7) - 1.0) for token, index in vocabulary.items()]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme=scheme)])
    tokenizer.add_special_tokens([special(text) for text in LLAMA_TOKENS])
    return tokenizer


def words(decoder: Any = None) -> tokenizers.Tokenizer:
    """Whole words; without a decoder they are joined with blanks."""
    texts = [
        "[UNK]",
        "we",
        "do",
        "n't",
        "'",
        "m",
        "s",
        ".",
        ",",
        "!",
        "?",
        "ca",
        "##t",
        "##s",
        "'ve",
        "'re",
        "'m",
        "'s",
    ]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({text: id for id, text in enumerate(texts)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([special("[CLS]")])
    return tokenizer


def write_folder(folder: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def open_folder(folder: Path) -> Tokenizer:
    parts = read_tokenizer_folder(folder)
    assert parts is not None
    # A model file stores the settings as JSON.
    return Tokenizer.from_parts(parts.tokenizer_json, json.loads(json.dumps(parts.settings)), parts.chat_template)
