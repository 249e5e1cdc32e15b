"""Reads config.json so that no key that could change the arithmetic goes unnoticed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from colibri.checkpoint import Checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError

# Keys without influence on the logits of a forward pass: bookkeeping, training, and sampling defaults, which
# generation_config.json holds today.
HARMLESS_KEYS = frozenset(
    {
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
        "name_or_path", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_commit_hash",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class",
        "prefix", "use_cache", "use_return_dict", "return_dict", "output_attentions", "output_hidden_states",
        "output_router_logits", "torchscript", "initializer_range", "router_aux_loss_coef", "router_z_loss_coef",
        "router_jitter_noise", "is_decoder", "chunk_size_feed_forward", "problem_type", "finetuning_task",
        "task_specific_params", "id2label", "label2id", "num_labels", "num_nextn_predict_layers", "max_length",
        "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
        "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
        "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
        "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    }
)  # fmt: skip
# Harmless with this value alone.
_HARMLESS_VALUES: dict[str, Any] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "use_bfloat16": False,
    "pruned_heads": {},
    "use_mrope": False,
}
_REQUIRED = object()


class ConfigReader:
    """Typed access to config.json that remembers what was read; `finish` refuses the rest.

    A key that is absent or null takes the default; without one it is an error. Methods raise CheckpointError for a
    value of the wrong type and UnsupportedModelError for one that Colibri has no arithmetic for, naming the key.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._config: Mapping[str, Any] = checkpoint.config
        self.where = checkpoint.config_source
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Say whether the key is present and not null; does not count as reading it."""
        return self._config.get(key) is not None

    def integer(self, *keys: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = 1 << 24) -> int:
        """Return an integer; of several names for one thing, the first is the one that messages use."""
        value = self._aliased(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self._bad(keys[0], value, f"an integer from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """Return an integer, or None when the key is absent or null."""
        return self.integer(key, minimum=minimum) if self.has(key) else self._absent(key)

    def number(self, key: str, *, default: Any = _REQUIRED, above: float = -math.inf) -> float:
        """Return a finite number greater than `above`."""
        value = self._aliased((key,), default)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not usable or value <= above:
            self._bad(key, value, f"a finite number above {above:g}")
        return float(value)

    def optional_number(self, key: str, *, above: float = -math.inf) -> float | None:
        """Return a finite number, or None when the key is absent or null."""
        return self.number(key, above=above) if self.has(key) else self._absent(key)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._aliased((key,), default)
        if not isinstance(value, bool):
            self._bad(key, value, "true or false")
        return value

    def integers(self, key: str) -> list[int]:
        """Return a list of integers, empty when the key is absent or null."""
        value = self._aliased((key,), [])
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            self._bad(key, value, "a list of integers")
        return value

    def choices(self, key: str, allowed: Sequence[str], length: int) -> list[str] | None:
        """Return a list of `length` words, each one of `allowed`, or None when the key is absent or null."""
        if not self.has(key):
            return self._absent(key)
        value = self._aliased((key,), None)
        if not isinstance(value, list) or len(value) != length:
            self._bad(key, value, f"a list of {length} words, one for each layer")
        for word in value:
            if word not in allowed:
                raise UnsupportedModelError(f"{self.where}: {key} has {word!r}; supported: {', '.join(allowed)}.")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        """Return an object, or None when the key is absent, null or {}."""
        value = self._aliased((key,), {})
        if not isinstance(value, dict):
            self._bad(key, value, "an object")
        return value or None

    def only(self, key: str, *supported: Any, default: Any) -> None:
        """Refuse the model unless the key is absent, null or has one of the supported values."""
        value = self._aliased((key,), default)
        if value not in supported:
            words = " or ".join(map(repr, supported))
            raise UnsupportedModelError(f"{self.where}: {key} = {value!r} is not supported, only {words} is.")

    def skip(self, key: str) -> None:
        """Mark a key as known and without effect in this family."""
        self._read.add(key)

    def finish(self) -> None:
        """Raise UnsupportedModelError naming the keys that nobody read and that are not known to be harmless."""
        unknown = [
            f"{key} = {value!r}"
            for key, value in self._config.items()
            if value is not None and key not in self._read and not _is_harmless(key, value)
        ]
        if unknown:
            listed = ", ".join(unknown[:10]) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
            raise UnsupportedModelError(
                f"{self.where} has keys that this family does not know and that could change the result: {listed}."
            )

    def _aliased(self, keys: Sequence[str], default: Any) -> Any:
        self._read.update(keys)
        given = {key: self._config[key] for key in keys if self.has(key)}
        if not given:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.where} has no {keys[0]}, which this family needs.")
            return default
        values = list(given.values())
        if any(value != values[0] for value in values):
            raise CheckpointError(f"{self.where} contradicts itself: {given}.")
        return values[0]

    def _absent(self, key: str) -> None:
        self._read.add(key)

    def _bad(self, key: str, value: Any, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key} = {value!r} should be {wanted}.")


def _is_harmless(key: str, value: Any) -> bool:
    if key in _HARMLESS_VALUES:
        return value == _HARMLESS_VALUES[key]
    # Dropout acts in training alone.
    return key in HARMLESS_KEYS or key.endswith(("_dropout", "_pdrop"))
