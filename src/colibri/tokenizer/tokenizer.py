"""Text to token ids and back, and conversations to prompts, with the results of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import tokenizers

from colibri.errors import TemplateError, TokenizerError, UsageError
from colibri.tokenizer.chat_template import ChatTemplate
from colibri.tokenizer.control_markers import ControlMarkers, Piece, private_characters, strings_in
from colibri.tokenizer.decoding import (
    CLEAN_UP_REPLACEMENTS,
    Stage,
    blank_mark,
    byte_level_bytes,
    decoder_stages,
    decoder_steps,
    fallback_byte,
)
from colibri.tokenizer.loading import load_tokenizer
from colibri.tokenizer.messages import checked_tools, normalized_messages, plain_data
from colibri.tokenizer.settings import TokenizerSettings

_GIVEN_BY_US = frozenset({"messages", "tools", "add_generation_prompt"})
_LARGEST_ID = (1 << 32) - 1


class Tokenizer:
    """The tokenizer of a model; made with `from_parts`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = settings.split_special_tokens
        self._settings = settings
        self._templates = dict(settings.extra_chat_templates)
        if chat_template is not None:
            self._templates["default"] = chat_template
        self._compiled: dict[str, tuple[ChatTemplate, ControlMarkers]] = {}
        self._added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id for id, token in self._added.items() if token.special)
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self._vocabulary_size = max(ids, default=-1) + 1
        decoder: Any = tokenizer.decoder
        self._decoder_json: bytes | None = None if decoder is None else decoder.__getstate__()
        kinds = {step["type"] for step in decoder_steps(self._decoder_json)}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        self._blank_mark = blank_mark(self._decoder_json)

    @classmethod
    def from_parts(
        cls, tokenizer_json: bytes, settings: Mapping[str, Any], chat_template: str | None = None
    ) -> Tokenizer:
        """A tokenizer from the parts that `read_tokenizer_folder` gave and a model file stored.

        Raises TokenizerError when a part is damaged.
        """
        tokenizer = load_tokenizer(tokenizer_json, "the model's tokenizer")
        return cls(tokenizer, TokenizerSettings.from_json(settings), chat_template)

    @property
    def vocabulary_size(self) -> int:
        """The largest token id plus one; ids below it may have no token."""
        return self._vocabulary_size

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids that end a generated text."""
        return self._settings.stop_token_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Named special tokens, such as `bos_token`, and their texts."""
        return self._settings.special_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return bool(self._templates)

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its text in the vocabulary, or None."""
        return self._tokenizer.token_to_id(token)

    def token_text(self, id: int) -> str | None:
        """The token in the form of the vocabulary, or None for an id without a token."""
        return self._tokenizer.id_to_token(_checked_id(id))

    def is_special(self, id: int) -> bool:
        """Whether the token is a special one, which decoding leaves out by default."""
        return id in self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`.

        Special tokens in the text become their ids; `add_special_tokens` applies the tokenizer's post-processor (BOS
        and the like). Raises UsageError for text that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise UsageError(f"text to encode must be a string, not {type(text).__name__}.")
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise UsageError("text to encode holds half of a surrogate pair; give valid Unicode text.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token add nothing."""
        text = self._tokenizer.decode([_checked_id(id) for id in ids], skip_special_tokens=skip_special_tokens)
        if self._settings.clean_up_tokenization_spaces:
            for old, new in CLEAN_UP_REPLACEMENTS:
                text = text.replace(old, new)
        return text

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters.

        Special tokens give their text in UTF-8. Raises TokenizerError for an id without a token.
        """
        token = self.token_text(id)
        if token is None:
            raise TokenizerError(f"the tokenizer has no token with id {id}; ids go up to {self._vocabulary_size - 1}.")
        if self.is_special(id):
            return token.encode()
        if self._is_byte_level:
            return byte_level_bytes(token)
        if self._has_byte_fallback:
            value = fallback_byte(token)
            if value is not None:
                return bytes((value,))
        return (token.replace(self._blank_mark, " ") if self._blank_mark else token).encode()

    def valid_token_mask(self, head_rows: int) -> bytes:
        """One byte for each row of the model's head: 1 where the id has a token, 0 in gaps and padding.

        Raises TokenizerError when the tokenizer has ids beyond the head.
        """
        if self._vocabulary_size > head_rows:
            raise TokenizerError(
                f"the tokenizer has token ids up to {self._vocabulary_size - 1}, but the model's head has only "
                f"{head_rows} rows; use the tokenizer that belongs to the model."
            )
        mask = bytearray(head_rows)
        for id in self._tokenizer.get_vocab(with_added_tokens=True).values():
            mask[id] = 1
        return bytes(mask)

    def decoder_stages(self) -> list[Stage] | None:
        """Fresh stages for decoding one sequence token by token; None if the decoder needs the whole sequence."""
        return decoder_stages(self._decoder_json, self._settings.clean_up_tokenization_spaces)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """The prompt for a conversation, as ids or, with `tokenize=False`, as text.

        Only the template's own control tokens become special ids. Their text inside messages, tools or variables is
        encoded as ordinary text, so that a message cannot forge a turn; control tokens are the special tokens and,
        outside the assistant's messages, those other added tokens that the template itself writes. Only for such
        messages the ids differ from those of transformers. No BOS is added beside the template's own.

        Raises TemplateError with the template's own message when it refuses the messages, and when the model has no
        template; UsageError naming the item when messages, tools or variables are malformed.
        """
        template, markers = self._template(with_tools=tools is not None)
        reserved = _GIVEN_BY_US.intersection(variables)
        if reserved:
            raise UsageError(f"the template variable {min(reserved)!r} is set by the call itself; choose another name.")
        given: dict[str, Any] = {"documents": None, **plain_data(variables, "template variables")}
        given["messages"] = normalized_messages(messages)
        given["tools"] = checked_tools(tools)
        trusted = {"add_generation_prompt": add_generation_prompt}
        trusted |= {name: text for name, text in self._settings.special_tokens.items() if name not in given}

        if not markers.occur_in(given):
            text = template.render(trusted | given)
            return self.encode(text, add_special_tokens=False) if tokenize else text
        texts = [template.source, *self._settings.special_tokens.values(), *strings_in(given)]
        private = private_characters(2 + len(markers.control_tokens), texts)
        opening, closing, *stand_ins = private
        rendered = template.render(trusted | markers.wrapped(given, opening, closing), verbatim=opening + closing)
        pieces = markers.pieces(rendered, opening, closing, template.render(trusted | given))
        if not tokenize:
            return "".join(piece.text for piece in pieces)
        return self._encode_pieces(pieces, markers, stand_ins)

    def _template(self, with_tools: bool) -> tuple[ChatTemplate, ControlMarkers]:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError("the model has no chat template; send a raw prompt instead of messages.")
        if name not in self._compiled:
            template = ChatTemplate(self._templates[name])
            added = self._added.values()
            # A tokenizer that splits special tokens has no ids to forge.
            special = [] if self._settings.split_special_tokens else [token.content for token in added if token.special]
            # Added runs of blanks are ordinary text, and other added tokens too unless the template writes them.
            written = [
                token.content
                for token in added
                if not token.special and not token.content.isspace() and token.content in template.literal_text
            ]
            self._compiled[name] = template, ControlMarkers(special, written)
        return self._compiled[name]

    def _encode_pieces(self, pieces: Sequence[Piece], markers: ControlMarkers, stand_ins: Sequence[str]) -> list[int]:
        """Encode with a tokenizer in which the control tokens are written as `stand_ins` and have no other text.

        It shares the vocabulary and every step with the tokenizer proper, so all else is encoded as usual.
        """
        stand_in_of = dict(zip(markers.control_tokens, stand_ins, strict=True))
        encoder = tokenizers.Tokenizer(self._tokenizer.model)
        # The stubs of the library give these two properties no setter.
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(self._tokenizer, step) is not None:
                setattr(encoder, step, getattr(self._tokenizer, step))
        encoder.encode_special_tokens = self._settings.split_special_tokens
        id_of: dict[str, int] = {}
        added: list[tokenizers.AddedToken] = []
        for id, token in sorted(self._added.items()):
            text = stand_in_of.get(token.content, token.content)
            id_of[text] = id
            added.append(
                tokenizers.AddedToken(
                    text,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
            )
        encoder.add_tokens(added)
        written = (
            piece.text if piece.plain else markers.pattern.sub(lambda match: stand_in_of[match.group()], piece.text)
            for piece in pieces
        )
        encoding = encoder.encode("".join(written), add_special_tokens=False)
        control_ids = {id_of[stand_in] for stand_in in stand_ins}
        ids: list[int] = []
        for token, id in zip(encoding.tokens, encoding.ids, strict=True):
            # By text, because the ids the encoder gave to added tokens are its own.
            if token in id_of:
                ids.append(id_of[token])
            elif id in control_ids:
                ids.extend(self._spelled(token, control_ids))
            else:
                ids.append(id)
        return ids

    def _spelled(self, token: str, control_ids: set[int]) -> list[int]:
        """A control token as single characters, for vocabularies whose model makes it from ordinary text."""
        ids = [part.id for character in token for part in self._tokenizer.model.tokenize(character)]
        if control_ids.intersection(ids):
            raise TemplateError(f"a message holds the text {token!r}, which this tokenizer cannot write as plain text.")
        return ids


def _checked_id(id: int) -> int:
    if not isinstance(id, int) or not 0 <= id <= _LARGEST_ID:
        raise UsageError(f"{id!r} is not a token id; ids are integers from 0.")
    return id
