"""Files of format version 1 that must be readable for ever."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from cbi.golden.make import FILES
from cbi.tiny_file import METADATA, SETTINGS, TEMPLATE, TOKENIZER, expert_values, tensor_values
from program.hand_built import EXPERTS, LAYERS, hand_built

from colibri.cbi import CbiFile

FOLDER = Path(__file__).parent / "golden"
SHA256 = {
    "v1-16-bit.cbi": "576a3c02de2293a91ebe6313cf9989bf90533faa949b30e8240f75563bd6c91d",
    "v1-f32.cbi": "7883635b096f58c1d3009dfed988371dc0fdd87e00e735eb348e89bb93b114c6",
    "v1-q4.cbi": "ab8584650afe67c98dee5670c0587608e625c249503729a91f991987b2048ee9",
    "v1-q8.cbi": "6f56158d029483674f776fbf672dad7ecf66ce4f359f97aa6f544ecf2ebd385a",
}
# Largest error of a value by format; all values are below 0.5 and multiples of 1/1024.
TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.5 / 256, "q8_g32": 0.5 / 127, "q4_g32": 0.5 / 6}


def test_every_golden_file_is_recorded():
    assert sorted(path.name for path in FOLDER.glob("*.cbi")) == sorted(SHA256) == sorted(FILES)


@pytest.mark.parametrize("name", SHA256)
def test_a_golden_file_is_unchanged_and_small(name):
    data = (FOLDER / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256[name]
    assert len(data) < 100_000


@pytest.mark.parametrize("name", SHA256)
def test_a_golden_file_is_read(name):
    built = hand_built()
    matrices, experts = FILES[name]
    with CbiFile.open(FOLDER / name) as file:
        file.verify_digests()
        assert file.program == built.program
        assert (file.tokenizer_json, file.chat_template) == (TOKENIZER, TEMPLATE)
        assert (file.settings, file.metadata) == (SETTINGS, METADATA)
        for tensor, source in tensor_values(built).items():
            format = "f32" if tensor in built.vectors else matrices
            np.testing.assert_allclose(file.read_tensor(tensor), source, rtol=0, atol=TOLERANCE[format])
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                sources = expert_values(built, layer, expert)
                for read, source, format in zip(file.read_expert(layer, expert), sources, experts, strict=True):
                    np.testing.assert_allclose(read, source, rtol=0, atol=TOLERANCE[format])
