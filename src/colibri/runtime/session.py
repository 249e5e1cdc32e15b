"""Session: one timeline of tokens on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from colibri.errors import UsageError
from colibri.runtime.backend import BackendSession, ForwardItem

if TYPE_CHECKING:
    from colibri.runtime.engine import Engine


def token_array(tokens: Sequence[int] | np.ndarray, vocabulary_size: int) -> np.ndarray:
    """Check token ids and return them as uint32 [n]; UsageError names the first bad one."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0:
        raise UsageError(f"tokens must be a non-empty one-dimensional sequence of ids, not shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise UsageError(f"tokens must be whole numbers, not {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array >= vocabulary_size))
    if bad.size:
        raise UsageError(f"token {array[bad[0]]} at index {bad[0]} is outside the vocabulary of {vocabulary_size}")
    return np.ascontiguousarray(array, np.uint32)


class Session:
    """One timeline: the tokens so far and the attention state they left.

    Made by `Engine.session`. One caller at a time (BusyError otherwise); use as a context
    manager or call `close`. Every use after that is a UsageError.

    >>> import colibri
    >>> with colibri.Engine() as engine, engine.session(context=64) as session:
    ...     logits = session.forward([1, 2, 3])
    ...     session.truncate(2)
    ...     logits.shape, session.position, session.tokens
    ((3, 4096), 2, [1, 2])
    """

    def __init__(self, engine: Engine, backend_session: BackendSession):
        self.engine = engine
        self.backend_session = backend_session

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Number of tokens in the state."""
        return self.backend_session.position

    @property
    def context(self) -> int:
        """Number of positions the session can hold."""
        return self.backend_session.context

    @property
    def tokens(self) -> list[int]:
        """The token ids of positions 0 .. position-1."""
        return self.backend_session.tokens().tolist()

    def forward(self, tokens: Sequence[int] | np.ndarray, *, last_only: bool = False) -> np.ndarray:
        """Append tokens [n] and return their logits, float32 [n, vocabulary].

        `last_only=True` returns [1, vocabulary] and computes the output layer for that row alone.
        Raises ContextLengthError, NonFiniteError, CancelledError, BusyError; the position is then unchanged.
        """
        item = ForwardItem(self, self._check(tokens), "last" if last_only else "all")
        return self.engine.run_one(item)

    def score(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append tokens [n] and return float32 [n]: log p(token | all before it), natural log.

        The first is NaN in an empty session, where nothing precedes it. Logits are reduced
        block by block, never held for all tokens. Errors as `forward`.
        """
        ids = self._check(tokens)
        start = self.position
        if start == 0:
            scores = self.engine.run_one(ForwardItem(self, ids, "none", scores=True))
            return np.concatenate([[np.float32(np.nan)], scores[:-1]])
        if start + len(ids) > self.context:
            self.engine.run_one(ForwardItem(self, ids, "none"))  # raises ContextLengthError with the figures
        # The first score needs the logits of the last position: that token is computed once more
        # (the same bits), with the new ones behind it.
        last = self.backend_session.tokens()[-1:]
        saved = start - 1
        self.backend_session.truncate(saved)
        try:
            return self.engine.run_one(ForwardItem(self, np.concatenate([last, ids]), "none", scores=True))[:-1]
        except BaseException:
            self.engine.run_one(ForwardItem(self, last, "none"))
            raise

    def truncate(self, position: int) -> None:
        """Forget every position from `position` on, and a cancel that no forward has met.

        Raises UsageError beyond the current position, BusyError.
        """
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= self.position:
            raise UsageError(f"truncate takes a position from 0 to {self.position}, not {position!r}")
        self.backend_session.truncate(position)

    def save(self) -> bytes:
        """The state as bytes, for `restore` in a session of the same model and state format."""
        return self.backend_session.save()

    def restore(self, blob: bytes | bytearray | memoryview) -> None:
        """Replace the state by a saved one; StateError if it does not fit, and nothing changes."""
        if not isinstance(blob, bytes | bytearray | memoryview):
            raise UsageError(f"restore takes the bytes that save gave, not {type(blob).__name__}")
        self.backend_session.restore(bytes(blob))

    def cancel(self) -> None:
        """End the running forward, else the next one, with CancelledError; callable from any thread."""
        self.backend_session.cancel()

    def close(self) -> None:
        """Free the state; allowed twice."""
        self.backend_session.close()

    def _check(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        return token_array(tokens, self.engine.vocabulary_size)
