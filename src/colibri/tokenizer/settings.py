"""The settings of a tokenizer as a model file stores them, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colibri.errors import TokenizerError


@dataclass(frozen=True)
class TokenizerSettings:
    """The typed form of `TokenizerParts.settings`; see there for the meaning of the fields."""

    special_tokens: Mapping[str, str]
    stop_token_ids: frozenset[int]
    clean_up_tokenization_spaces: bool
    split_special_tokens: bool
    extra_chat_templates: Mapping[str, str]

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> TokenizerSettings:
        """Raises TokenizerError naming the field that is missing, unknown or of the wrong type."""
        unknown = settings.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise TokenizerError(f"the model's tokenizer settings have the unknown field {min(unknown)!r}.")
        ids = settings.get("stop_token_ids")
        if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids):
            raise _damaged("stop_token_ids")
        return cls(
            special_tokens=_texts(settings, "special_tokens"),
            stop_token_ids=frozenset(ids),
            clean_up_tokenization_spaces=_flag(settings, "clean_up_tokenization_spaces"),
            split_special_tokens=_flag(settings, "split_special_tokens"),
            extra_chat_templates=_texts(settings, "extra_chat_templates"),
        )


def _texts(settings: Mapping[str, Any], name: str) -> dict[str, str]:
    value = settings.get(name)
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in (*value.keys(), *value.values())):
        raise _damaged(name)
    return dict(value)


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name)
    if not isinstance(value, bool):
        raise _damaged(name)
    return value


def _damaged(name: str) -> TokenizerError:
    return TokenizerError(f"the model's tokenizer settings lack a valid {name!r}; convert the model again.")
