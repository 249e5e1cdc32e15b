"""Streamed text equals the text decoded at once; stop strings cut it in the same place."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer.tiny_tokenizers import DEMO, byte_level, metaspace, open_folder, sentencepiece, words, write_folder
from tokenizers import decoders

from colibri.errors import UsageError
from colibri.tokenizer import StopStrings, StreamingDetokenizer


def gemma_like():
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def strip_after_fuse():
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("▁", 2, 0), decoders.Replace("▁H", " [H]")]
    )
    return tokenizer


def strip_each_token():
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Replace("i", "ii")])
    return tokenizer


KINDS = {
    "byte_level": (byte_level, {}),
    "sentencepiece": (sentencepiece, {}),
    "gemma_like": (gemma_like, {}),
    "strip_after_fuse": (strip_after_fuse, {}),
    "strip_each_token": (strip_each_token, {}),
    "metaspace_first": (metaspace, {}),
    "metaspace_never": (lambda: metaspace("never"), {}),
    "words_cleaned": (words, {"clean_up_tokenization_spaces": True}),
    "words": (words, {}),
    "word_pieces": (lambda: words(decoders.WordPiece()), {}),
    "ctc": (lambda: words(decoders.CTC()), {}),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return {
        name: open_folder(write_folder(tmp_path_factory.mktemp(name), build(), **config))
        for name, (build, config) in KINDS.items()
    }


def stream(tokenizer, ids, skip=True):
    detokenizer = StreamingDetokenizer(tokenizer, skip)
    return [*(detokenizer.push(id) for id in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_ids_stream_as_decode(name, opened, data):
    tokenizer = opened[name]
    any_id = st.integers(0, tokenizer.vocabulary_size + 2)
    # Runs of bytes that make up characters are rare among random ids.
    characters = st.text(max_size=3).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    parts = data.draw(st.lists(st.one_of(any_id.map(lambda id: [id]), characters), max_size=20))
    ids = [id for part in parts for id in part]
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_a_character_of_four_tokens_comes_at_once(opened):
    ids = opened["byte_level"].encode("\N{GRINNING FACE}")
    assert stream(opened["byte_level"], ids) == ["", "", "", "\N{GRINNING FACE}", ""]


def test_an_unfinished_character_gives_one_replacement_mark(opened):
    ids = opened["byte_level"].encode("a\N{GRINNING FACE}")[:-1]
    assert "".join(stream(opened["byte_level"], ids)) == "a\ufffd"


def test_the_dummy_blank_is_removed_once(opened):
    for name in ("sentencepiece", "metaspace_first"):
        tokenizer = opened[name]
        hi, x, blank = (tokenizer.token_id(token) for token in ("▁Hi", "▁x", "▁"))
        assert stream(tokenizer, [hi, x, hi]) == ["Hi", " x", " Hi", ""]
        run = [blank, *(tokenizer.token_id(f"<0x{value:02X}>") for value in "你".encode())]
        assert "".join(stream(tokenizer, run)) == "你"


def test_a_detokenizer_starts_afresh_after_finish(opened):
    detokenizer = StreamingDetokenizer(opened["sentencepiece"])
    hi = opened["sentencepiece"].token_id("▁Hi")
    for _ in range(2):
        assert detokenizer.push(hi) + detokenizer.push(hi) + detokenizer.finish() == "Hi Hi"


def test_cost_does_not_grow_with_the_sequence():
    tokenizer = open_folder(DEMO)
    ids = tokenizer.encode((DEMO / "heldout" / "verse.txt").read_text(encoding="utf-8"))[:2000]
    detokenizer = StreamingDetokenizer(tokenizer)

    def seconds() -> float:
        start = time.thread_time()
        for id in ids:
            detokenizer.push(id)
        return time.thread_time() - start

    first = min(seconds() for _ in range(3))
    for _ in range(10):
        seconds()
    assert min(seconds() for _ in range(3)) < 3 * first


def stop_stream(stops, pieces):
    watcher = StopStrings(stops)
    text = ""
    for piece in pieces:
        emitted, stopped = watcher.push(piece)
        text += emitted
        if stopped:
            return text, True
    text += watcher.finish()
    return text, watcher.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["O P Q"], ["O", " P", " Q", " R"], ("", True)),
        (["O P Q"], ["O", " P", " R"], ("O P R", False)),
        (["ab"], ["a", "a", "b"], ("a", True)),
        (["aab"], ["aa", "ab"], ("a", True)),
        (["stop", "stopping"], ["a stop", "ping"], ("a ", True)),
        (["stopping", "op"], ["a stop", "ping"], ("a ", True)),
        (["xyz"], ["ends on x", "y"], ("ends on xy", False)),
        (["é"], ["caf", "é", "!"], ("caf", True)),
        ([], ["a", "b"], ("ab", False)),
        (["b", "bc"], ["abc"], ("a", True)),
        (["abcd", "bc"], ["xabc", "d"], ("x", True)),
        (["abcd", "bc"], ["xabc", "e"], ("xa", True)),
        (["abcd", "bc"], ["xabc"], ("xa", True)),
    ],
)
def test_stop_strings(stops, pieces, expected):
    assert stop_stream(stops, pieces) == expected


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30), max_size=12),
)
def test_stop_strings_for_every_split(text, stops, cuts):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    found = [position for position in (text.find(stop) for stop in stops) if position >= 0]
    assert stop_stream(stops, pieces) == (text[: min(found)] if found else text, bool(found))


def test_text_is_held_no_longer_than_needed():
    watcher = StopStrings(["<end>"])
    assert watcher.push("abc<en") == ("abc", False)
    assert watcher.push("x") == ("<enx", False)
    assert watcher.push("<end>tail") == ("", True)
    assert watcher.push("more") == ("", True)
    assert watcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], [5], "abc"])
def test_unusable_stops(stops):
    with pytest.raises(UsageError, match="stop"):
        StopStrings(stops)
