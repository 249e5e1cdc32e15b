"""A model and its timelines on the reference VM."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from colibri.cbi.reader import CbiFile
from colibri.errors import ColibriError, ContextLengthError, StateError, UsageError
from colibri.quantize import FORMATS
from colibri.reference.ops import Expert, Weight
from colibri.reference.state import STATE_FORMATS, AttentionState
from colibri.reference.vm import Call, Model, Trace, run

LogitsMode = Literal["none", "last", "all"]


class ReferenceEngine:
    """A `.cbi` file on the NumPy VM. All weights are held as float32.

    Set `trace` to see every op's result (colibri.reference.vm.Trace). Raises ModelFileError for a file that cannot
    be read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        with CbiFile.open(Path(path)) as file:
            self.model = load_model(file)
            self.digest = file.digest
        self.trace: Trace | None = None

    @property
    def vocabulary_size(self) -> int:
        return self.model.program.vocabulary_size

    @property
    def context_limit(self) -> int:
        """Positions the model was made for."""
        return self.model.program.context_limit

    def session(self, context: int | None = None, state_format: str | None = None) -> ReferenceSession:
        """Open a timeline of `context` positions (default: the model's limit) with state "f32", "f16" or "q8"
        (default: what the file says). Raises UsageError for a context outside 1 to the limit.
        """
        if context is None:
            context = self.context_limit
        if not 1 <= context <= self.context_limit:
            raise UsageError(f"context must be from 1 to {self.context_limit}, not {context}")
        if state_format is None:
            state_format = STATE_FORMATS[self.model.program.default_state_format - 1]
        return ReferenceSession(self, context, state_format)

    def forward_batch(
        self, items: Sequence[tuple[ReferenceSession, Sequence[int] | np.ndarray]], logits: LogitsMode = "all"
    ) -> list[np.ndarray | ColibriError]:
        """Run each (session, tokens) pair, one after the other; an item that fails gives its exception."""
        results: list[np.ndarray | ColibriError] = []
        for session, tokens in items:
            try:
                results.append(session.forward(tokens, logits))
            except ColibriError as error:
                results.append(error)
        return results


class ReferenceSession:
    """The tokens so far and what each attention layer remembers of them."""

    def __init__(self, engine: ReferenceEngine, context: int, state_format: str):
        self.context = context
        self.state_format = state_format
        self._engine = engine
        self._tokens = np.zeros(0, np.uint32)
        self._states = [AttentionState(state, state_format) for state in engine.model.program.states]
        self._cancelled = False
        self._closed = False

    @property
    def position(self) -> int:
        """Number of tokens in the state."""
        if self._closed:
            raise UsageError("the session is closed; open another one")
        return len(self._tokens)

    def tokens(self) -> np.ndarray:
        """Token ids uint32 [position]."""
        return self._tokens.copy()

    def forward(self, tokens: Sequence[int] | np.ndarray, logits: LogitsMode = "all") -> np.ndarray:
        """Append tokens [n]; returns float32 [n, vocabulary], the last row alone [1, vocabulary], or [0, vocabulary].

        Raises UsageError, ContextLengthError, NonFiniteError and CancelledError; the position is then unchanged.
        """
        ids = self._checked(tokens)
        start, count = self.position, len(ids)
        first_output = {"all": 0, "last": count - 1, "none": count}[logits]
        call = Call(ids, np.arange(start, start + count), np.arange(first_output, count))
        try:
            result = run(self._engine.model, self._states, call, self._engine.trace, lambda: self._cancelled)
        except BaseException:
            self.truncate(start)
            raise
        finally:
            self._cancelled = False
        self._tokens = np.concatenate((self._tokens, ids))
        return result

    def score(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append tokens [n]; entry i of the float32 [n] is log p(tokens[i + 1] | all up to i), the last is NaN."""
        logits = self.forward(tokens).astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        scores = np.full(len(logits), np.nan, np.float32)
        scores[:-1] = log_probabilities[np.arange(len(logits) - 1), np.asarray(tokens)[1:]]
        return scores

    def truncate(self, position: int) -> None:
        """Forget positions >= position, and a cancel that no forward has met; UsageError beyond the position."""
        if not 0 <= position <= self.position:
            raise UsageError(f"truncate takes a position from 0 to {self.position}, not {position}")
        self._cancelled = False
        self._tokens = self._tokens[:position]
        for state in self._states:
            state.truncate(position)

    def save(self) -> bytes:
        """The state as bytes, for `restore` in a reference session of the same model and state format."""
        arrays = {"tokens": self._tokens, "owner": self._owner()}
        for number, state in enumerate(self._states):
            arrays[f"keys{number}"], arrays[f"values{number}"] = state.keys, state.values
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    def restore(self, blob: bytes) -> None:
        """Replace the state by a saved one; StateError if it does not fit, and nothing changes."""
        try:
            with np.load(io.BytesIO(blob), allow_pickle=False) as file:
                arrays = dict(file)
        except Exception as error:
            raise StateError("the saved state is damaged; save it again") from error
        if "owner" not in arrays or not np.array_equal(arrays["owner"], self._owner()):
            raise StateError("the saved state is of another model or state format; restore it where it was saved")
        if len(arrays["tokens"]) > self.context:
            raise StateError(
                f"the saved state has {len(arrays['tokens'])} positions, the session holds {self.context};"
                " open a session with a longer context"
            )
        self._tokens = arrays["tokens"]
        for number, state in enumerate(self._states):
            state.keys, state.values = arrays[f"keys{number}"], arrays[f"values{number}"]

    def cancel(self) -> None:
        """End the running or next forward with CancelledError; callable from any thread."""
        self._cancelled = True

    def close(self) -> None:
        """Free the state; allowed twice."""
        self._closed = True
        self._tokens = self._tokens[:0]
        self._states = []

    def _owner(self) -> np.ndarray:
        return np.frombuffer(self._engine.digest + self.state_format.encode(), np.uint8)

    def _checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(tokens)
        vocabulary_size = self._engine.vocabulary_size
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise UsageError("tokens must be a non-empty sequence of token ids")
        if ids.min() < 0 or ids.max() >= vocabulary_size:
            raise UsageError(f"token ids must be from 0 to {vocabulary_size - 1}")
        if self.position + len(ids) > self.context:
            raise ContextLengthError(
                f"{self.position} + {len(ids)} tokens do not fit in a context of {self.context};"
                " open the session with a longer one or truncate it"
            )
        return ids.astype(np.uint32)


def load_model(file: CbiFile) -> Model:
    """Read every weight of an open file."""
    quantised_ids = {format.id for format in FORMATS if not format.is_float}
    weights = [Weight(file.read_tensor(entry.name), entry.format in quantised_ids) for entry in file.tensors]
    expert_sets = []
    for set_number, expert_set in enumerate(file.expert_sets):
        experts = []
        for expert_number, entry in enumerate(expert_set.experts):
            matrices = file.read_expert(set_number, expert_number)
            experts.append(Expert(*map(Weight, matrices, (number in quantised_ids for number in entry.formats))))
        expert_sets.append(tuple(experts))
    return Model(file.program, weights, expert_sets)
