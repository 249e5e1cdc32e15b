"""The decoder of a tokenizer as a chain of stages that take one token at a time.

A decoder turns the tokens of a whole sequence into text; some steps look at their neighbours (bytes of one character,
the blank at the start). Each stage here keeps exactly what it still needs, so that text can be given out as soon as it
is certain, and the pieces joined are what the decoder of the `tokenizers` library gives for the whole sequence.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"

# In this order: each replaces in the result of the one before.
CLEAN_UP_REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for their own byte, the other bytes, in order, for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    return table | {chr(0x100 + index): value for index, value in enumerate(others)}


_BYTE_OF_CHARACTER = byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; a token with any other character is its own text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def fallback_byte(token: str) -> int | None:
    """The byte of a token such as `<0xE4>`, or None."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


class Stage(Protocol):
    """One step of a decoder."""

    def push(self, piece: str) -> Iterable[str]: ...
    def finish(self) -> Iterable[str]: ...


class ByteLevelStage:
    """Tokens are bytes; characters come out whole, malformed bytes as U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> Iterable[str]:
        return (self._decoder.decode(byte_level_bytes(piece)),)

    def finish(self) -> Iterable[str]:
        return (self._decoder.decode(b"", final=True),)


class ByteFallbackStage:
    """A run of byte tokens is text if the whole run is UTF-8, else one U+FFFD for each byte.

    The run is held to its end: a later byte decides what the earlier ones are.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> Iterable[str]:
        value = fallback_byte(piece)
        if value is not None:
            self._run.append(value)
            return ()
        return (*self.finish(), piece)

    def finish(self) -> Iterable[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return ()
        try:
            return (run.decode("utf-8"),)
        except UnicodeDecodeError:
            return (_REPLACEMENT,) * len(run)


class ReplaceTokenStage:
    """Replaces a text in each token on its own."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def push(self, piece: str) -> Iterable[str]:
        return (piece.replace(self._old, self._new),)

    def finish(self) -> Iterable[str]:
        return ()


class ReplaceTextStage:
    """Replaces a text in everything that passes, as `str.replace` does; holds what may be its beginning."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held = ""

    def push(self, piece: str) -> Iterable[str]:
        *replaced, rest = (self._held + piece).split(self._old)
        kept = longest_beginning_at_end(rest, self._old)
        self._held = rest[len(rest) - kept :]
        return (self._new.join([*replaced, rest[: len(rest) - kept]]),)

    def finish(self) -> Iterable[str]:
        held, self._held = self._held, ""
        return (held,)


class StripTokenStage:
    """Removes up to `count` characters `content` from the left of each token."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count

    def push(self, piece: str) -> Iterable[str]:
        return (piece[_leading(piece, self._content, self._count) :],)

    def finish(self) -> Iterable[str]:
        return ()


class StripTextStage:
    """Removes up to `count` characters `content` from the left of the whole text, once."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._left = content, count

    def push(self, piece: str) -> Iterable[str]:
        cut = _leading(piece, self._content, self._left)
        self._left = self._left - cut if cut == len(piece) else 0
        return (piece[cut:],)

    def finish(self) -> Iterable[str]:
        return ()


class MetaspaceStage:
    """The blank mark becomes a blank; in the first token it is dropped when the encoder had put it there."""

    def __init__(self, mark: str, drop_first: bool) -> None:
        self._mark, self._drop = mark, drop_first

    def push(self, piece: str) -> Iterable[str]:
        blank = "" if self._drop else " "
        self._drop = False
        return (piece.replace(self._mark, blank),)

    def finish(self) -> Iterable[str]:
        return ()


class SpaceBetweenStage:
    """Tokens are joined with blanks: a tokenizer without a decoder."""

    def __init__(self) -> None:
        self._first = True

    def push(self, piece: str) -> Iterable[str]:
        blank = "" if self._first else " "
        self._first = False
        return (blank + piece,)

    def finish(self) -> Iterable[str]:
        return ()


class StageChain:
    """Stages one after the other: tokens go in, text comes out."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)

    def push(self, token: str) -> str:
        """The text that is certain after `token`."""
        return "".join(self._through(0, (token,)))

    def finish(self) -> str:
        """The text that was held back."""
        texts: list[str] = []
        for index, stage in enumerate(self._stages):
            texts.extend(self._through(index + 1, stage.finish()))
        return "".join(texts)

    def _through(self, first: int, pieces: Iterable[str]) -> Iterable[str]:
        for stage in self._stages[first:]:
            pieces = [after for before in pieces for after in stage.push(before)]
        return pieces


def longest_beginning_at_end(text: str, pattern: str) -> int:
    """The length of the longest proper beginning of `pattern` that `text` ends with."""
    for length in range(min(len(pattern) - 1, len(text)), 0, -1):
        if text.endswith(pattern[:length]):
            return length
    return 0


def _leading(text: str, content: str, most: int) -> int:
    count = 0
    while count < most and count < len(text) and text[count] == content:
        count += 1
    return count


def decoder_stages(decoder_json: bytes | None, clean_up: bool) -> list[Stage] | None:
    """Fresh stages for the decoder with the serialised form `decoder_json` (None: a tokenizer without one).

    `clean_up` appends the removal of blanks before punctuation. Returns None for a decoder that is not made of byte
    level, byte fallback, fuse, replace, strip and metaspace steps; its text is known only when the sequence ends.
    """
    stages: list[Stage] | None = [SpaceBetweenStage()]
    if decoder_json is not None:
        stages = _described_stages(decoder_steps(decoder_json))
    if stages is not None and clean_up:
        stages += [ReplaceTextStage(old, new) for old, new in CLEAN_UP_REPLACEMENTS]
    return stages


def blank_mark(decoder_json: bytes | None) -> str | None:
    """The character that stands for a blank in the tokens of a SentencePiece-like vocabulary, or None."""
    for step in decoder_steps(decoder_json):
        if step["type"] == "Metaspace":
            return step["replacement"]
        if step["type"] == "Replace" and step["content"] == " ":
            return step["pattern"].get("String")
    return None


def decoder_steps(decoder_json: bytes | None) -> list[dict[str, Any]]:
    """The steps of a decoder as the library describes them, sequences flattened."""
    return [] if decoder_json is None else _flattened(json.loads(decoder_json))


def _flattened(described: dict[str, Any]) -> list[dict[str, Any]]:
    if described["type"] != "Sequence":
        return [described]
    return [step for part in described["decoders"] for step in _flattened(part)]


def _described_stages(steps: Sequence[dict[str, Any]]) -> list[Stage] | None:
    stages: list[Stage] = []
    # Once the tokens are fused, later steps see one text instead of tokens.
    fused = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if not fused:
                stages.append(ByteLevelStage())
                fused = True
            case {"type": "ByteFallback"} if not fused:
                stages.append(ByteFallbackStage())
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                stages.append(ReplaceTextStage(old, new) if fused else ReplaceTokenStage(old, new))
            case {"type": "Strip", "content": str(content), "start": int(count), "stop": 0}:
                stages.append(StripTextStage(content, count) if fused else StripTokenStage(content, count))
            case {"type": "Metaspace", "replacement": str(mark)} if not fused:
                stages.append(MetaspaceStage(mark, step.get("prepend_scheme", "always") != "never"))
            case _:
                return None
    return stages
