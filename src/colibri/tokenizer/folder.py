"""Reads the tokenizer of a Hugging Face folder into the parts that a model file stores.

The rules are those of transformers: `chat_template.jinja` wins over the template in `tokenizer_config.json`, special
tokens named in the configuration are added to the vocabulary when `tokenizer.json` lacks them, and whether a BOS token
is put before raw text is decided by the post-processor in `tokenizer.json` alone (`add_bos_token` of the configuration
is already part of it and not applied again).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from colibri.errors import TokenizerError
from colibri.tokenizer.loading import load_tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json")
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerParts:
    """What a model file stores of a tokenizer.

    `settings` is JSON data: `special_tokens` (name to text), `stop_token_ids` (ascending),
    `clean_up_tokenization_spaces`, `split_special_tokens`, and `extra_chat_templates` (name to source).
    """

    tokenizer_json: bytes
    chat_template: str | None
    settings: dict[str, Any]


def read_tokenizer_folder(folder: Path | str) -> TokenizerParts | None:
    """The tokenizer of a Hugging Face folder, or None when the folder has none.

    Raises TokenizerError naming the file when one is damaged, and when the tokenizer is in another form than
    `tokenizer.json`.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        for name in _OTHER_TOKENIZER_FILES:
            if (folder / name).is_file():
                raise TokenizerError(
                    f"{folder / name}: only tokenizer.json is supported; save the tokenizer with "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers to get one."
                )
        return None
    config = _read_object(folder / "tokenizer_config.json")
    _merge_special_tokens_map(config, folder)
    tokenizer_json = _read_bytes(path)
    tokenizer = load_tokenizer(tokenizer_json, str(path))
    named = _named_tokens(config, folder)
    additions = _missing_tokens(tokenizer, config, named, folder)
    if additions:
        tokenizer.add_tokens(additions)
        tokenizer_json = tokenizer.to_str().encode()
    templates = _chat_templates(config, folder)
    special_tokens = {name: token.content for name, token in named.items()}
    settings = {
        "special_tokens": special_tokens,
        "stop_token_ids": _stop_token_ids(tokenizer, special_tokens.get("eos_token"), folder),
        "clean_up_tokenization_spaces": _cleans_up(tokenizer, config),
        "split_special_tokens": bool(config.get("split_special_tokens", False)),
        "extra_chat_templates": {name: text for name, text in templates.items() if name != "default"},
    }
    return TokenizerParts(tokenizer_json, templates.get("default"), settings)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from error


def _read_text(path: Path) -> str:
    try:
        # Universal newlines, as the reference reads it.
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text; fetch the file again.") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON; fetch the file again.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object; fetch the file again.")
    return value


def _merge_special_tokens_map(config: dict[str, Any], folder: Path) -> None:
    # The map is the older form: it counts only where the configuration does not list the added tokens itself.
    if "added_tokens_decoder" in config:
        return
    for name, value in _read_object(folder / "special_tokens_map.json").items():
        if name == "additional_special_tokens" and config.get(name):
            continue
        config[name] = value


def _added_token(value: Any, name: str, folder: Path, special: bool | None = None) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=special is not False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {flag: bool(value[flag]) for flag in _ADDED_TOKEN_FLAGS if flag in value}
        if special is not None:
            flags["special"] = special
        return tokenizers.AddedToken(value["content"], **flags)
    raise TokenizerError(f"{folder / 'tokenizer_config.json'}: {name} must be a token's text or description.")


def _named_tokens(config: dict[str, Any], folder: Path) -> dict[str, tokenizers.AddedToken]:
    """The tokens with a name, which templates see as variables: the usual ones, and others such as `image_token`."""
    values = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    for name, value in config.items():
        if name not in values and name.endswith("_token") and (isinstance(value, str) or _is_described(value)):
            values[name] = value
    if isinstance(config.get("extra_special_tokens"), dict):
        values |= config["extra_special_tokens"]
    return {name: _added_token(value, name, folder, special=True) for name, value in values.items()}


def _is_described(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _missing_tokens(
    tokenizer: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, tokenizers.AddedToken], folder: Path
) -> list[tokenizers.AddedToken]:
    """Tokens of the configuration that tokenizer.json lacks or describes otherwise, in the order they are added."""
    present = tokenizer.get_added_tokens_decoder()
    described = {repr(token) for token in present.values()}
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to tokens.")
    additions = [
        token
        for token in (
            _added_token(value, "added_tokens_decoder", folder)
            for _, value in sorted(listed.items(), key=lambda item: int(item[0]))
        )
        if repr(token) not in described
    ]
    known = {token.content for token in present.values()} | {token.content for token in additions}
    extra = config.get("extra_special_tokens")
    if not isinstance(extra, list):
        extra = config.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: additional_special_tokens must be a list.")
    extra_tokens = [_added_token(value, "additional_special_tokens", folder, special=True) for value in extra]
    for token in (*named.values(), *extra_tokens):
        if token.content not in known:
            known.add(token.content)
            additions.append(token)
    names = {token.content for token in named.values()}
    for token in additions:
        if token.content in names:
            token.special = True
    return additions


def _cleans_up(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> bool:
    # The clean-up is meant for WordPiece; on BPE text it removes blanks that were in the text.
    forced = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    wanted = bool(config.get("clean_up_tokenization_spaces", False))
    return wanted and (type(tokenizer.model).__name__ != "BPE" or bool(forced))


def _chat_templates(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Template sources by name; files win over the whole entry of the configuration."""
    from_files: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        from_files["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        from_files[path.stem] = _read_text(path)
    if from_files:
        return from_files
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in (*value.keys(), *value.values())):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a template or a list of named templates."
        )
    return value


def _stop_token_ids(tokenizer: tokenizers.Tokenizer, eos_token: str | None, folder: Path) -> list[int]:
    """The list of generation_config.json, else of config.json, and the tokenizer's own end token in any case."""
    generation = folder / "generation_config.json"
    ids = _eos_ids(_read_object(generation), generation)
    if not ids:
        model = folder / "config.json"
        config = _read_object(model)
        text_config = config.get("text_config")
        ids = _eos_ids(config, model) or (_eos_ids(text_config, model) if isinstance(text_config, dict) else set())
    if eos_token is not None:
        eos_id = tokenizer.token_to_id(eos_token)
        if eos_id is not None:
            ids.add(eos_id)
    return sorted(ids)


def _eos_ids(config: dict[str, Any], path: Path) -> set[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if type(item) is not int or item < 0:
            raise TokenizerError(f"{path}: eos_token_id must be a token id or a list of token ids, not {item!r}.")
    return set(values)
