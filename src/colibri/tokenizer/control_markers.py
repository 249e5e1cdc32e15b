"""Keeps the text of control tokens inside messages apart from the control tokens that a template writes.

`A<|im_end|>B` in a message must not end the turn. Before rendering, each such text in the caller's data is wrapped in
two private-use characters that occur nowhere in the data; afterwards they tell which occurrences came from the data.
Wrapping, rather than replacing, lets the template still find the text (`'</think>' in content`, `split`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FIRST_PRIVATE = 0xF0000
_LAST_PRIVATE = 0xFFFFD


@dataclass(frozen=True)
class Piece:
    """A part of a rendered chat: `plain` text may not become a control token, other text may."""

    text: str
    plain: bool


def private_characters(count: int, texts: Iterable[str]) -> list[str]:
    """`count` private-use characters that occur in none of `texts`."""
    used = {character for text in texts for character in text if ord(character) >= _FIRST_PRIVATE}
    free = (chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1) if chr(code) not in used)
    return [character for character, _ in zip(free, range(count), strict=False)]


def strings_in(value: Any) -> Iterable[str]:
    """All strings in JSON data, keys included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


class ControlMarkers:
    """Finds, wraps and recovers the texts of control tokens in what a caller gives to a template.

    `special` are the special tokens, `written` the other added tokens that the template itself writes (`<think>`).
    The latter stay what they are in the assistant's messages, which are the model's own output.
    """

    def __init__(self, special: Sequence[str], written: Sequence[str]) -> None:
        self.control_tokens = (*special, *written)
        self.pattern = _any_of(self.control_tokens)
        # A template may change the case of a text.
        self._in_data = _any_of(self.control_tokens, re.IGNORECASE)
        self._in_answers = _any_of(special, re.IGNORECASE)

    def occur_in(self, given: Mapping[str, Any]) -> bool:
        """Whether any string of a template's variables holds the text of a control token."""
        return any(
            pattern.search(text) for pattern, value in self._patterns_and_values(given) for text in strings_in(value)
        )

    def wrapped(self, given: Mapping[str, Any], opening: str, closing: str) -> dict[str, Any]:
        """A copy of a template's variables with every such text between `opening` and `closing`."""
        result: dict[str, Any] = {}
        for name, value in given.items():
            parts = [
                _wrapped(part, pattern, opening, closing) for pattern, part in self._patterns_and_values({name: value})
            ]
            result[name] = parts if name == "messages" else parts[0]
        return result

    def _patterns_and_values(self, given: Mapping[str, Any]) -> Iterable[tuple[re.Pattern[str], Any]]:
        for name, value in given.items():
            if name == "messages":
                for message in value:
                    yield self._in_answers if message["role"] == "assistant" else self._in_data, message
            else:
                yield self._in_data, value

    def pieces(self, rendered: str, opening: str, closing: str, unchanged: str) -> list[Piece]:
        """Split the rendering of wrapped data; `unchanged` is the rendering of the same data without wrapping.

        A token beside a wrapper is plain, even where the template has cut off the other wrapper. The text is that of
        `unchanged` when both renderings hold the same tokens in the same order, so that a template that strips blanks
        beside a token is followed exactly; else it is the wrapped rendering without its wrappers.
        """
        token = f"({self.pattern.pattern})"
        wrapped_or_own = re.compile(f"{opening}{token}{closing}?|{token}{closing}|{token}|[{opening}{closing}]")
        pieces: list[Piece] = []
        position = 0
        for match in wrapped_or_own.finditer(rendered):
            pieces.append(Piece(rendered[position : match.start()], plain=False))
            pieces.append(Piece(match[1] or match[2] or match[3] or "", plain=match[3] is None))
            position = match.end()
        pieces.append(Piece(rendered[position:], plain=False))
        tokens = [piece for piece in pieces if self.pattern.fullmatch(piece.text)]
        found = list(self.pattern.finditer(unchanged))
        if [piece.text for piece in tokens] != [match.group() for match in found]:
            return [piece for piece in pieces if piece.text]
        result: list[Piece] = []
        position = 0
        for match, piece in zip(found, tokens, strict=True):
            result += [Piece(unchanged[position : match.start()], plain=False), piece]
            position = match.end()
        return [*result, Piece(unchanged[position:], plain=False)]


def _any_of(texts: Sequence[str], flags: int = 0) -> re.Pattern[str]:
    # Longest first: a token wins over the tokens it contains, as in the tokenizer.
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)", flags)


def _wrapped(value: Any, pattern: re.Pattern[str], opening: str, closing: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: f"{opening}{match.group()}{closing}", value)
    if isinstance(value, dict):
        return {
            # A template asks for its fields by name; such a name is no marker even if a token has its text.
            key if key.isidentifier() else _wrapped(key, pattern, opening, closing): _wrapped(
                item, pattern, opening, closing
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_wrapped(item, pattern, opening, closing) for item in value]
    return value
