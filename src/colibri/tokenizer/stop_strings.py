"""Stop strings in a stream of text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from colibri.errors import UsageError
from colibri.tokenizer.decoding import longest_beginning_at_end


class StopStrings:
    """Cuts a stream of text before the first stop string.

    What comes out, joined, is the whole text cut at the earliest match. Text that may be the beginning of a stop string
    is held until it is known. Matching works on the text and not on tokens, so a stop string may lie across any number
    of tokens. Raises UsageError for an empty stop string or one that is no string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise UsageError("stop must be a list of strings; put a single one into a list.")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"stop[{index}] is {stop!r}; every stop must be a string that is not empty.")
        self._stops = tuple(stops)
        self._pattern = re.compile("|".join(map(re.escape, self._stops)) or "(?!)")
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stopped

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was found; after that nothing more comes out."""
        if self._stopped:
            return "", True
        text = self._held + text
        kept = max((longest_beginning_at_end(text, stop) for stop in self._stops), default=0)
        open_from = len(text) - kept
        match = self._pattern.search(text)
        # Another stop string that began earlier may still be completed; it would be the earliest match.
        if match and match.start() <= open_from:
            self._held, self._stopped = "", True
            return text[: match.start()], True
        self._held = text[open_from:]
        return text[:open_from], False

    def finish(self) -> str:
        """The held text: the stream ended before it became a stop string. `stopped` is final after this."""
        held, self._held = self._held, ""
        match = self._pattern.search(held)
        self._stopped = self._stopped or match is not None
        return held[: match.start()] if match else held
