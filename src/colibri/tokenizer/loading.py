"""Opening a serialised tokenizer with the `tokenizers` library."""

from __future__ import annotations

import tokenizers

from colibri.errors import TokenizerError


def load_tokenizer(tokenizer_json: bytes, source: str) -> tokenizers.Tokenizer:
    """The tokenizer in `tokenizer_json`, without the truncation and padding that may be stored in it.

    Raises TokenizerError naming `source`.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except BaseException as error:
        # A panic of the library is no Exception, and has no class that could be named here.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{source} is not a tokenizer that can be read: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
