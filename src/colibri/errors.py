"""Every error that Colibri raises on purpose.

A message is one sentence that names the file, field or option and says what to do.
The command line prints it on one line and exits with `exit_code`.
"""

from __future__ import annotations


class ColibriError(Exception):
    """Base class: catch this to catch everything that Colibri raises on purpose."""

    exit_code = 1


class UsageError(ColibriError, ValueError):
    """An argument, option or environment variable has a value that cannot be used."""

    exit_code = 2


class CheckpointError(ColibriError):
    """A source checkpoint (folder, shard, index, config) is missing, damaged or hostile."""


class UnsupportedModelError(ColibriError):
    """The model is well formed, but asks for arithmetic that Colibri does not have."""


class ModelFileError(ColibriError):
    """A `.cbi` file is missing, damaged, truncated or of another version."""


class ProgramError(ColibriError):
    """A program breaks a rule of the op table; the message names the op."""


class TokenizerError(ColibriError):
    """A tokenizer is missing, damaged or does not fit the model."""


class TemplateError(ColibriError):
    """A chat template refused the messages, or is missing, hostile or broken."""


class ContextLengthError(ColibriError):
    """Tokens do not fit in the context the session was opened with."""


class NonFiniteError(ColibriError):
    """NaN or infinity appeared; the message names the layer and, where known, the expert."""


class BusyError(ColibriError):
    """A session is in use by another call."""


class CancelledError(ColibriError):
    """The call was cancelled; the session is at the position it had before."""


class OutOfMemoryError(ColibriError, MemoryError):
    """Memory for a model, session or call could not be had; the message gives the size."""


class MemoryBudgetError(OutOfMemoryError):
    """Memory would exceed the budget (`ram`); the message gives the figures and what to change."""


class StateError(ColibriError):
    """A saved state does not belong to this model, session or version."""


class UsageFileWarning(UserWarning):
    """What earlier runs used could not be read or kept: the message names the file. The run goes on without it."""


class MemoryBudgetWarning(UserWarning):
    """The memory that was asked for may not be had: the message names the limit. What was asked for goes on."""
