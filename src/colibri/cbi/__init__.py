"""The `.cbi` file: one model in one file; spec/cbi.md describes it."""

from colibri.cbi.layout import ExpertEntry, ExpertSetEntry, Header, Section, SectionType, TensorEntry
from colibri.cbi.reader import CbiFile
from colibri.cbi.writer import CbiWriter

__all__ = [
    "CbiFile", "CbiWriter", "ExpertEntry", "ExpertSetEntry", "Header", "Section", "SectionType", "TensorEntry",
]  # fmt: skip
