"""Tokenizers from the metadata of GGUF files, against the tokenizers they were exported from."""

from __future__ import annotations

import heapq
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoint.gguf_models import write_model
from families.tiny_folder import tensors_of
from tokenizer.tiny_tokenizers import DEMO
from tokenizers import decoders, models, normalizers, pre_tokenizers

from colibri.checkpoint import GgufCheckpoint, open_checkpoint
from colibri.errors import TokenizerError
from colibri.tokenizer import Tokenizer, TokenizerParts, read_tokenizer_folder, read_tokenizer_metadata
from colibri.tokenizer.metadata import _RULES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXTS = (
    "", " ", "\n", "Hello world", "  two  blanks ", "I'm we'LL you'Re it's", "a\n\n\nb\r\n c", "1234567 12,345.67",
    "naïve café 模型 🐦 e\u0301",
    "x<|endoftext|>y", "<|user|>Define \"harbor\".<|end|>", "def f(x):\n    return x**2\n",
    "\t\ttabs  \n", "don't!!! ...?  --", "<think> hm </think>", "\u00a0nbsp\u2003", "\u017fong 'ſ",
)  # fmt: skip


def exported(tokenizer: tokenizers.Tokenizer, pre: str | None, size: int | None = None) -> dict[str, Any]:
    """What llama.cpp's converter writes for a byte-level tokenizer; rows without a token get a name that is made up."""
    data = json.loads(tokenizer.to_str())
    ids = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = {entry["id"]: entry for entry in data["added_tokens"]}
    tokens, kinds = [], []
    for id in range(size or max(ids) + 1):
        tokens.append(ids.get(id, f"[PAD{id}]"))
        special = added[id]["special"] if id in added else None
        kinds.append(UNUSED if id not in ids else NORMAL if special is None else CONTROL if special else USER_DEFINED)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def opened(metadata: dict[str, Any]) -> tuple[Tokenizer, TokenizerParts]:
    parts = read_tokenizer_metadata(metadata, "m.gguf")
    assert parts is not None
    return Tokenizer.from_parts(parts.tokenizer_json, parts.settings, chat_template=parts.chat_template), parts


def noise(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    pieces = [*"abeinostABC019 \n\t'.,!?-_", "  ", "\r\n", " the", "ing", "é", "模", "🐦", "'s", "'LL", "e\u0301"]
    return ["".join(chance.choices(pieces, k=chance.randint(1, 40))) for _ in range(count)]


def test_the_demo_tokenizer_survives_the_way_through_a_gguf_file(tmp_path: Path) -> None:
    folder = read_tokenizer_folder(DEMO)
    assert folder is not None
    metadata = exported(tokenizers.Tokenizer.from_str(folder.tokenizer_json.decode()), "gpt-2")
    keys = {"eos_token_id": 0, "eot_token_id": 3, "padding_token_id": 0}
    metadata |= {f"tokenizer.ggml.{key}": id for key, id in keys.items()}
    metadata["tokenizer.chat_template"] = folder.chat_template
    write_model(tmp_path / "m.gguf", "qwen3_moe", tensors_of("qwen3_moe"), **metadata)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        read = checkpoint.tokenizer_metadata()
    assert read == metadata
    tokenizer, parts = opened(read)
    expected = Tokenizer.from_parts(folder.tokenizer_json, folder.settings, chat_template=folder.chat_template)
    assert parts.settings == folder.settings
    assert parts.chat_template == folder.chat_template
    heldout = "".join(path.read_text() for path in sorted((DEMO / "heldout").glob("*")))
    for text in (*TEXTS, *noise(1, 300), heldout[:200_000]):
        ids = expected.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == expected.decode(ids)
    messages = [{"role": "user", "content": "Say <|end|> please"}]
    assert tokenizer.apply_chat_template(messages) == expected.apply_chat_template(messages)


def trained(split: str | None, normalizer: Any = None, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of 600 tokens, split as its family does it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *noise(2, 400)], trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|endoftext|>", special=True, normalized=False)])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    ("pre", "tokenizer"),
    [
        ("gpt-2", trained(None)),
        ("olmo", trained(None, normalizers.NFC())),
        ("qwen2", trained(CASELESS % "", normalizers.NFC())),
        ("llama-bpe", trained(CASELESS % "{1,3}", ignore_merges=True)),
    ],
)
def test_rules_of_each_family(pre: str, tokenizer: tokenizers.Tokenizer) -> None:
    read, _ = opened(exported(tokenizer, pre))
    for text in (*TEXTS, *noise(3, 500)):
        ids = tokenizer.encode(text).ids
        assert read.encode(text) == ids
        assert read.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    assert read.is_special(read.encode("<|endoftext|>")[0])
    assert not read.is_special(read.encode("<think>")[0])


@pytest.mark.parametrize("pre", ["default", None])
def test_files_without_the_name_of_the_rules_are_split_as_llama_cpp_does(pre: str | None) -> None:
    """One pattern after another, each cutting what the ones before left in one piece."""
    source = trained(None)
    steps: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in _RULES["default"].patterns]
    pieces = pre_tokenizers.Sequence(steps).pre_tokenize_str("Costs $12345, it's  a<=b\n x")
    assert [piece for piece, _ in pieces] == [
        "Costs", " ", "$", "123", "45", ",", " it", "'", "s", " ", " a", "<=", "b", "\n", " x",
    ]  # fmt: skip
    read, _ = opened(exported(source, pre))
    assert read.decode(read.encode("Costs $12345, it's  a<=b\n x")) == "Costs $12345, it's  a<=b\n x"
    assert len(read.encode("12345")) >= 2


def test_bos_and_eos() -> None:
    metadata = exported(trained(CASELESS % "{1,3}", ignore_merges=True), "llama-bpe")
    end = metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")
    metadata |= {"tokenizer.ggml.bos_token_id": end, "tokenizer.ggml.eot_token_id": end + 1}
    metadata |= {"tokenizer.ggml.eos_token_id": end}
    tokenizer, parts = opened(metadata)
    # These vocabularies begin with BOS unless the file says otherwise.
    assert tokenizer.encode("a")[0] == end
    assert tokenizer.encode("a", add_special_tokens=False)[0] != end
    assert parts.settings["stop_token_ids"] == [end, end + 1]
    assert parts.settings["special_tokens"] == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    without, _ = opened(metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True})
    assert without.encode("a")[0] != end
    assert without.encode("a")[-1] == end
    none, _ = opened(metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert none.encode("a")[0] != end


def test_ids_keep_their_place_around_rows_without_a_token() -> None:
    metadata = exported(trained(None), "gpt-2")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens += ["[PAD602]", "[PAD603]", "<|late|>", "[PAD605]"]
    kinds += [UNUSED, UNUSED, CONTROL, UNUSED]
    tokenizer, _ = opened(metadata)
    assert tokenizer.encode("a<|late|>")[-1] == len(tokens) - 2
    mask = tokenizer.valid_token_mask(len(tokens) + 2)
    assert [mask[id] for id in range(len(tokens) - 5, len(tokens) + 2)] == [1, 0, 0, 1, 0, 0, 0]


def test_chat_templates_by_name() -> None:
    metadata = exported(trained(None), "gpt-2") | {
        "tokenizer.chat_template": "{{ 1 }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ 2 }}",
    }
    _, parts = opened(metadata)
    assert parts.chat_template == "{{ 1 }}"
    assert parts.settings["extra_chat_templates"] == {"tool_use": "{{ 2 }}"}


@pytest.mark.parametrize("metadata", [{}, {"tokenizer.ggml.model": "no_vocab"}, {"tokenizer.ggml.model": "none"}])
def test_no_vocabulary(metadata: dict[str, Any]) -> None:
    assert read_tokenizer_metadata(metadata, "m.gguf") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"model": 5}, "model should be of type str"),
        ({"pre": "tekken"}, "pre = 'tekken' is not supported, only default, gpt-2"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "'ab' is not two parts"),
        ({"merges": ["q zzzzz"]}, "m.gguf"),
        ({"token_type": [1, 1]}, "tokens and 2 token types"),
        ({"token_type": [9] * 602}, "unknown token type 9"),
        ({"tokens": ["a"] * 602}, "'a' has the ids 0 and 1"),
        ({"eos_token_id": 602}, "eos_token_id = 602 is not the id"),
        ({"bos_token_id": "a"}, "bos_token_id = 'a' is not the id"),
        ({"add_bos_token": 1}, "add_bos_token should be of type bool"),
    ],
)
def test_malformed_metadata_names_the_key(changes: dict[str, Any], message: str) -> None:
    metadata = exported(trained(None), "gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(TokenizerError, match=message) as caught:
        read_tokenizer_metadata(metadata, "m.gguf")
    assert "m.gguf" in str(caught.value)


def test_stop_ids_that_are_none() -> None:
    metadata = exported(trained(None), "gpt-2") | {"tokenizer.ggml.eos_token_id": 0xFFFFFFFF}
    assert opened(metadata)[1].settings["stop_token_ids"] == []


def scored() -> dict[str, Any]:
    """A vocabulary as SentencePiece trains it: scores fall in the order in which tokens were merged."""
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=[])
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [text for text in noise(5, 400) if text.isascii()]
    tokenizer.train_from_iterator(words, trainer)
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [piece for piece, _ in pieces if len(piece) > 1]
    single = [piece for piece, _ in pieces if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *merged, *single]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(single))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(merged) + len(single))]
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    keys |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def merge_by_score(text: str, metadata: dict[str, Any]) -> list[int]:
    """What SentencePiece does: of all neighbours that make a token, join those with the best score, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: id for id, token in enumerate(tokens) if id > 258}
    parts = list(text.replace(" ", "▁"))
    while True:
        joins = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joins:
            break
        _, at = heapq.nsmallest(1, joins)[0]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    result: list[int] = []
    for part in parts:
        result += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return result


def test_scored_vocabularies_merge_by_score() -> None:
    metadata = scored()
    tokenizer, parts = opened(metadata)
    for text in ("a", "Hello there", " the boat  ", "éa 模 🐦", "<s>x", *noise(6, 300)):
        if "<s>" in text:
            assert tokenizer.encode(text)[:2] == [1, 1]
            continue
        expected = merge_by_score(" " + text, metadata)
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode([1, *expected]) == text
    assert parts.settings["stop_token_ids"] == [2]
    plain, _ = opened(metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert plain.encode("the a") == merge_by_score("the a", metadata)


def test_scored_vocabularies_equal_the_usual_conversion() -> None:
    """As transformers converts a Llama or Mixtral tokenizer.model, with the merges found there."""
    convert = pytest.importorskip("transformers.tokenization_utils_base")
    generate = getattr(convert, "generate_merges", None)
    if generate is None:
        pytest.skip("this version of transformers has the function elsewhere")
    metadata = scored()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = generate(vocabulary, dict(zip(tokens, scores, strict=True)))
    model = json.loads(opened(metadata)[1].tokenizer_json)["model"]
    assert [tuple(pair) for pair in model["merges"]] == [tuple(pair) for pair in merges]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "tokens and 1 scores"),
        ({"unknown_token_id": 999999}, "unknown_token_id = 999999"),
    ],
)
def test_malformed_scores(changes: dict[str, Any], message: str) -> None:
    metadata = scored() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(TokenizerError, match=message):
        read_tokenizer_metadata(metadata, "m.gguf")


def test_a_token_too_long_to_be_cut_everywhere() -> None:
    metadata = scored()
    metadata["tokenizer.ggml.tokens"][300] = "x" * 1001
    with pytest.raises(TokenizerError, match="token 300 has 1001 characters"):
        read_tokenizer_metadata(metadata, "m.gguf")
