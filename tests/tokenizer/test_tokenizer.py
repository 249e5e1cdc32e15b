"""Encoding and decoding equal transformers; bytes, masks and stop sets are those of the vocabulary."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer.tiny_tokenizers import (
    DEMO,
    byte_level,
    metaspace,
    open_folder,
    sentencepiece,
    special,
    words,
    write_folder,
)
from tokenizers import decoders, models

from colibri.errors import TokenizerError, UsageError
from colibri.tokenizer import Tokenizer, read_tokenizer_folder

TEXTS = [
    "",
    "hello world",
    "  two  blanks ",
    "   three",
    "Hi how are x",
    "日本語 😀 naïve",
    "<|im_start|>hello<|im_end|>",
    "<s>Hi</s> x",
    "a\n\n\tb",
    "<think>hm",
    "we do n't . ca !",
]


@pytest.fixture(scope="module")
def reference():
    return pytest.importorskip("transformers").PreTrainedTokenizerFast


BUILDERS = {
    "byte_level": lambda: (byte_level(), {"eos_token": "<|im_end|>"}),
    "sentencepiece": lambda: (sentencepiece(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "metaspace_first": lambda: (metaspace("first"), {"bos_token": "<s>"}),
    "metaspace_always": lambda: (metaspace("always"), {"bos_token": "<s>"}),
    "words": lambda: (words(), {"clean_up_tokenization_spaces": True}),
    "word_pieces": lambda: (words(decoders.WordPiece()), {"clean_up_tokenization_spaces": False}),
    "byte_level_clean_up": lambda: (byte_level(), {"clean_up_tokenization_spaces": True}),
    "byte_level_forced_clean_up": lambda: (
        byte_level(),
        {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        },
    ),
    "split_special_tokens": lambda: (byte_level(), {"split_special_tokens": True}),
    "tokens_only_in_the_configuration": lambda: (
        byte_level(),
        {
            "eos_token": "<|eot|>",
            "image_token": "<image>",
            "additional_special_tokens": ["<|extra|>", "<think>"],
            "added_tokens_decoder": {"267": {"content": "<think>", "special": True, "normalized": False}},
        },
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_equals_transformers(name, tmp_path, reference):
    tokenizer, config = BUILDERS[name]()
    folder = write_folder(tmp_path, tokenizer, **config)
    ours, theirs = open_folder(folder), reference.from_pretrained(folder)
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert dict(ours.special_tokens) == theirs.special_tokens_map


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_ids_decode_as_transformers(data, tmp_path_factory):
    reference = pytest.importorskip("transformers").PreTrainedTokenizerFast
    tokenizer, config = BUILDERS[data.draw(st.sampled_from(sorted(BUILDERS)))]()
    folder = write_folder(tmp_path_factory.mktemp("t"), tokenizer, **config)
    ours, theirs = open_folder(folder), reference.from_pretrained(folder)
    ids = data.draw(st.lists(st.integers(0, ours.vocabulary_size + 3), max_size=40))
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_demo_tokenizer_equals_transformers(reference):
    ours, theirs = open_folder(DEMO), reference.from_pretrained(DEMO)
    text = (DEMO / "heldout" / "pysrc.txt").read_text(encoding="utf-8")[:20000]
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    messages = [{"role": "user", "content": 'Define "light".'}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, return_dict=False, add_generation_prompt=True
    )
    assert ours.stop_token_ids == {0, 3}
    assert ours.vocabulary_size == 4096


@pytest.mark.parametrize("template_bos", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_never_doubled(template_bos, add_bos, tmp_path, reference):
    template = ("{{ bos_token }}" if template_bos else "") + "[INST] {{ messages[0].content }} [/INST]"
    source = reference(
        tokenizer_object=sentencepiece(prepend_bos=False), bos_token="<s>", eos_token="</s>", add_bos_token=add_bos
    )
    source.chat_template = template
    source.save_pretrained(tmp_path)
    ours, theirs = open_folder(tmp_path), reference.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi how"}]
    chat = ours.apply_chat_template(messages)
    assert chat == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat.count(1) == template_bos
    raw = ours.encode("Hi how")
    assert raw == theirs.encode("Hi how")
    assert raw.count(1) == add_bos


def test_the_post_processor_alone_decides_about_bos(tmp_path, reference):
    for add_bos in (True, False):
        folder = write_folder(
            tmp_path / str(add_bos), sentencepiece(prepend_bos=not add_bos), bos_token="<s>", add_bos_token=add_bos
        )
        assert open_folder(folder).encode("Hi") == reference.from_pretrained(folder).encode("Hi")


def test_stored_truncation_and_padding_are_not_applied(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    ours = open_folder(write_folder(tmp_path, tokenizer))
    assert ours.decode(ours.encode("hello hello hello")) == "hello hello hello"


def test_token_bytes_of_a_byte_level_vocabulary(tmp_path):
    ours = open_folder(write_folder(tmp_path, byte_level()))
    ids = ours.encode("\N{GRINNING FACE}")
    assert [list(ours.token_bytes(id)) for id in ids] == [[240], [159], [152], [128]]
    text = "hello wörld\n<|im_end|>日本"
    assert b"".join(map(ours.token_bytes, ours.encode(text))) == text.encode()
    assert {ours.token_bytes(id) for id in range(256)} == {bytes((value,)) for value in range(256)}


@pytest.mark.parametrize("build", [sentencepiece, metaspace])
def test_token_bytes_with_byte_fallback(build, tmp_path):
    ours = open_folder(write_folder(tmp_path, build()))
    assert b"".join(map(ours.token_bytes, ours.encode("Hi 你", add_special_tokens=False))) == " Hi 你".encode()
    assert ours.token_bytes(1) == b"<s>"
    assert ours.token_bytes(3 + 0xE4) == b"\xe4"
    with pytest.raises(TokenizerError, match=r"no token with id 9999"):
        ours.token_bytes(9999)


def gapped() -> tokenizers.Tokenizer:
    vocabulary = {f"t{id}": id for id in range(300) if id != 280}
    return tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))


def test_mask_marks_gaps_and_padding(tmp_path):
    ours = open_folder(write_folder(tmp_path, gapped()))
    assert ours.vocabulary_size == 300
    mask = ours.valid_token_mask(320)
    assert len(mask) == 320
    assert [id for id in range(320) if not mask[id]] == [280, *range(300, 320)]
    assert ours.valid_token_mask(300).count(1) == 299
    with pytest.raises(TokenizerError, match=r"ids up to 299.*only 299 rows"):
        ours.valid_token_mask(299)
    assert ours.decode([280, 310]) == ""


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 5}, {5, 7, 258}),
        ({"eos_token_id": 9}, {"eos_token_id": [5, 6]}, {9, 258}),
        ({}, {"eos_token_id": [5, 6]}, {5, 6, 258}),
        (None, {"eos_token_id": 5}, {5, 258}),
        (None, {"text_config": {"eos_token_id": 4}}, {4, 258}),
        (None, None, {258}),
    ],
)
def test_stop_ids(generation, config, expected, tmp_path):
    tokenizer = byte_level()
    eos = tokenizer.token_to_id("<|im_end|>")
    folder = write_folder(tmp_path, tokenizer, eos_token="<|im_end|>")
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    assert open_folder(folder).stop_token_ids == (expected - {258}) | {eos}


def test_special_tokens_map_counts_unless_the_configuration_lists_added_tokens(tmp_path, reference):
    for index, config in enumerate(({"eos_token": "<|im_start|>"}, {"added_tokens_decoder": {}})):
        folder = write_folder(tmp_path / str(index), byte_level(), **config)
        described = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "additional_special_tokens": ["<new>"]}
        (folder / "special_tokens_map.json").write_text(json.dumps(described))
        ours, theirs = open_folder(folder), reference.from_pretrained(folder)
        assert dict(ours.special_tokens) == theirs.special_tokens_map
        assert ours.encode("a<new>b") == theirs.encode("a<new>b")


def test_is_special(tmp_path):
    tokenizer = byte_level()
    ours = open_folder(write_folder(tmp_path, tokenizer))
    assert ours.is_special(tokenizer.token_to_id("<|im_end|>"))
    assert not ours.is_special(tokenizer.token_to_id("<think>"))
    assert not ours.is_special(0)
    assert not ours.is_special(10**6)


def test_templates_of_a_folder(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = write_folder(tmp_path, byte_level(), chat_template=named)
    ours = open_folder(folder)
    messages = [{"role": "user", "content": "x"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "D"
    assert ours.apply_chat_template(messages, tools=[{}], tokenize=False) == "T"
    # The file wins over the whole entry.
    (folder / "chat_template.jinja").write_text("J")
    assert open_folder(folder).apply_chat_template(messages, tools=[{}], tokenize=False) == "J"


def test_folder_without_tokenizer_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_tokenizer_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_other_kinds_of_tokenizer_are_refused_by_name(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x0a")
    with pytest.raises(TokenizerError, match=rf"{name}: only tokenizer\.json is supported"):
        read_tokenizer_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"eos_token": 5}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", b'{"additional_special_tokens": "x"}'),
        ("generation_config.json", b'{"eos_token_id": "5"}'),
        ("config.json", b'{"eos_token_id": [true]}'),
        ("special_tokens_map.json", b"[" * 100000),
    ],
)
def test_damaged_files_are_named(name, content, tmp_path):
    folder = write_folder(tmp_path, byte_level())
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        read_tokenizer_folder(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"stop_token_ids": [-1]},
        {"stop_token_ids": None},
        {"special_tokens": {"eos_token": 1}},
        {"clean_up_tokenization_spaces": "yes"},
        {"other": 1},
    ],
)
def test_damaged_settings_are_named(change, tmp_path):
    parts = read_tokenizer_folder(write_folder(tmp_path, byte_level()))
    assert parts is not None
    with pytest.raises(TokenizerError, match=next(iter(change))):
        Tokenizer.from_parts(parts.tokenizer_json, parts.settings | change)


def test_unusable_arguments(tmp_path):
    ours = open_folder(write_folder(tmp_path, byte_level()))
    with pytest.raises(UsageError, match="surrogate"):
        ours.encode("\ud800")
    with pytest.raises(UsageError, match="must be a string"):
        ours.encode(None)  # type: ignore[arg-type]
    for id in (-1, 2**32, "1"):
        with pytest.raises(UsageError, match="is not a token id"):
            ours.decode([id])  # type: ignore[list-item]


def test_left_stripping_special_token(tmp_path, reference):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([special("<mask>", lstrip=True, rstrip=True)])
    folder = write_folder(tmp_path, tokenizer)
    assert open_folder(folder).encode("a <mask> b") == reference.from_pretrained(folder).encode("a <mask> b")
