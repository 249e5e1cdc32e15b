"""Choosing the next token. The arithmetic is in the core, so a seed gives the same text everywhere."""

from __future__ import annotations

import ctypes as c
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from colibri.errors import UsageError
from colibri.runtime import native


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is drawn from the logits; the defaults switch every step off but temperature.

    Order: penalties, temperature, top_k, top_p, min_p. `temperature=0` takes the largest
    logit (ties: the lowest id). The draw depends on seed and position alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_logprobs: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "temperature": (0.0, 1e6),
            "top_k": (0, 2**32 - 1),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (1e-6, 1e6),
            "frequency_penalty": (-1e6, 1e6),
            "presence_penalty": (-1e6, 1e6),
            "top_logprobs": (0, native.TOP_LOGPROBS),
            "seed": (0, 2**64 - 1),
        }
        for field in fields(self):
            value, (low, high) = getattr(self, field.name), bounds[field.name]
            whole = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise UsageError(f"{field.name} must be a {'whole ' if whole else ''}number, not {value!r}")
            if not (math.isfinite(value) and low <= value <= high):
                raise UsageError(f"{field.name} must be from {low} to {high}, not {value}")
        if self.top_p == 0:
            raise UsageError("top_p must be above 0; use temperature=0 for the most likely token")


@dataclass(frozen=True)
class Sample:
    """A drawn token. Log-probabilities are natural logs, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws tokens for a vocabulary; any number of threads may use one.

    `allowed` holds, for each id, whether it has a token (head rows beyond the tokenizer never win).
    """

    def __init__(self, vocabulary_size: int, allowed: Sequence[int] | None = None):
        self._vocabulary_size = vocabulary_size
        self._memory = threading.local()
        self._allowed = None
        if allowed is not None:
            mask = np.array(list(allowed), bool)
            if mask.shape != (vocabulary_size,):
                raise UsageError(f"the token mask has {mask.size} entries for a vocabulary of {vocabulary_size}")
            self._allowed = np.packbits(mask, bitorder="little")

    def sample(
        self, logits: np.ndarray, options: SamplingOptions, history: Sequence[int], prompt_count: int, position: int
    ) -> Sample:
        """Draw the token for `position` from float32 logits [vocabulary]."""
        logits = np.ascontiguousarray(logits, np.float32)
        if logits.shape != (self._vocabulary_size,):
            raise UsageError(f"logits have shape {logits.shape}, not ({self._vocabulary_size},)")
        tokens = np.asarray(history, np.uint32)
        parameters = native.Sampling(**{field.name: getattr(options, field.name) for field in fields(options)})
        result, message = native.SampleResult(), native.message_buffer()
        status = native.library.colibri_sample(
            c.byref(parameters),
            logits.ctypes.data,
            self._vocabulary_size,
            None if self._allowed is None else self._allowed.ctypes.data,
            tokens.ctypes.data,
            len(tokens),
            prompt_count,
            position,
            self._scratch().ctypes.data,
            c.byref(result),
            message,
            len(message),
        )
        native.check(status, message)
        top = zip(result.top_tokens[: options.top_logprobs], result.top_logprobs, strict=False)
        return Sample(result.token, result.logprob, tuple(top))

    def _scratch(self) -> np.ndarray:
        """Working memory of the core's sampler, kept for each thread."""
        if not hasattr(self._memory, "scratch"):
            size = native.library.colibri_sample_scratch_size(self._vocabulary_size)
            self._memory.scratch = np.zeros(size, np.uint8)
        return self._memory.scratch
