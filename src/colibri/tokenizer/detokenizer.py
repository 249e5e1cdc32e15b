"""Text from tokens as they are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri.tokenizer.decoding import StageChain

if TYPE_CHECKING:
    from colibri.tokenizer.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns a sequence of token ids into text, piece by piece.

    All pieces joined, with the one of `finish`, equal `tokenizer.decode(ids, skip_special_tokens)`. A piece holds only
    text that later tokens cannot change: the bytes of an unfinished character are kept back, and in vocabularies with
    byte fallback (`<0xE4>`) a whole run of byte tokens, because one bad byte changes the text of the run. A token costs
    the same however long the sequence is. For the few kinds of decoder that need the whole sequence (WordPiece, CTC)
    all text comes from `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._start()

    def _start(self) -> None:
        stages = self._tokenizer.decoder_stages()
        self._chain = None if stages is None else StageChain(stages)
        self._kept_ids: list[int] = []

    def push(self, id: int) -> str:
        """The text that became certain with this token; often empty. An id without a token adds nothing."""
        if self._chain is None:
            self._kept_ids.append(id)
            return ""
        token = self._tokenizer.token_text(id)
        if token is None or (self._skip_special_tokens and self._tokenizer.is_special(id)):
            return ""
        return self._chain.push(token)

    def finish(self) -> str:
        """The text held back so far; afterwards a new sequence can begin."""
        if self._chain is None:
            text = self._tokenizer.decode(self._kept_ids, self._skip_special_tokens)
        else:
            text = self._chain.finish()
        self._start()
        return text
