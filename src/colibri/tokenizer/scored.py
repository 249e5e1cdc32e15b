"""Tokenizers of SentencePiece kind, given by a score for each token, as a BPE model with byte fallback.

Text is merged by the best score first; a merge of a BPE model ranks higher the better the score of what it makes. The
order among merges of one score is that of the tokenizer.json files that transformers makes of such vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from colibri.errors import TokenizerError

_BLANK = "\u2581"
# Every token is cut at every place; the longest in real vocabularies are runs of some dozen blanks.
_LONGEST_TOKEN = 1000


def scored_model(
    tokens: list[str],
    ids: Mapping[str, int],
    merged: Set[int],
    scores: list[float],
    source: str,
    *,
    unknown: str | None,
    prefix: bool,
) -> dict[str, Any]:
    """Return the normalizer, pre_tokenizer, decoder and model of a tokenizer.json.

    ids: of all tokens in use. merged: the ids that text can be merged to. prefix: a blank is put before the text.
    Raises TokenizerError naming `source`.
    """
    if len(scores) != len(tokens):
        raise TokenizerError(f"{source} has {len(tokens)} tokens and {len(scores)} scores.")
    if unknown is not None and unknown not in ids:
        raise TokenizerError(f"{source}: the unknown token {unknown!r} is one that is not used.")
    merges: list[tuple[float, str, str]] = []
    for id in sorted(merged):
        text = tokens[id]
        if len(text) > _LONGEST_TOKEN:
            raise TokenizerError(f"{source}: token {id} has {len(text)} characters, more than {_LONGEST_TOKEN}.")
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        pairs = [(left, right) for left, right in cuts if ids.get(left) in merged and ids.get(right) in merged]
        merges += [(scores[id], *pair) for pair in sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    prepend = [{"type": "Prepend", "prepend": _BLANK}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": dict(ids),
            "merges": [[left, right] for _, left, right in merges],
        },
    }
