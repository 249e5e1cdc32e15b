"""Weight formats: codes, scales and tiles in plain NumPy, and the activation quantiser of the numeric contract."""

from colibri.quantize.activations import dequantise_activations, quantise_activations
from colibri.quantize.codes import QuantisedRows, dequantise, quantise
from colibri.quantize.floats import bf16_to_float32, float32_to_bf16, float32_to_float16
from colibri.quantize.formats import (
    ACTIVATION_BLOCK,
    FORMATS,
    LAYOUTS,
    WeightFormat,
    WeightLayout,
    format_named,
    layout_named,
)
from colibri.quantize.tiles import default_layout, pack, packed_size, unpack

__all__ = [
    "ACTIVATION_BLOCK",
    "FORMATS",
    "LAYOUTS",
    "QuantisedRows",
    "WeightFormat",
    "WeightLayout",
    "bf16_to_float32",
    "default_layout",
    "dequantise",
    "dequantise_activations",
    "float32_to_bf16",
    "float32_to_float16",
    "format_named",
    "layout_named",
    "pack",
    "packed_size",
    "quantise",
    "quantise_activations",
    "unpack",
]
