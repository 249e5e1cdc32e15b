"""Programs: what a model computes, as a verified list of ops from the op table."""

from colibri.program.builder import ProgramBuilder
from colibri.program.encode import decode, encode
from colibri.program.program import Entry, Op, Program, State, Value
from colibri.program.text import program_text
from colibri.program.verify import verify

__all__ = ["Entry", "Op", "Program", "ProgramBuilder", "State", "Value", "decode", "encode", "program_text", "verify"]
