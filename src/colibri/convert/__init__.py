"""Conversion of checkpoints into `.cbi` files."""

from colibri.convert.conversion import convert
from colibri.convert.recipes import WEIGHTS
from colibri.convert.report import ConvertReport, RoleError

__all__ = ["WEIGHTS", "ConvertReport", "RoleError", "convert"]
