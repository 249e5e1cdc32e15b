"""Tokenizers, chat templates, streaming text and stop strings."""

from colibri.tokenizer.detokenizer import StreamingDetokenizer
from colibri.tokenizer.folder import TokenizerParts, read_tokenizer_folder
from colibri.tokenizer.metadata import read_tokenizer_metadata
from colibri.tokenizer.stop_strings import StopStrings
from colibri.tokenizer.tokenizer import Tokenizer

__all__ = [
    "StopStrings",
    "StreamingDetokenizer",
    "Tokenizer",
    "TokenizerParts",
    "read_tokenizer_folder",
    "read_tokenizer_metadata",
]
