#!/usr/bin/env python3
"""Made the golden files of format version 1, once. Files here are never made again: readers must go on reading them.

PYTHONPATH=tests python tests/cbi/golden/make.py
"""

from pathlib import Path

from cbi.tiny_file import write_tiny

FOLDER = Path(__file__).resolve().parent
FILES = {
    "v1-f32.cbi": ("f32", ("f32", "f32", "f32")),
    "v1-q8.cbi": ("q8_g32", ("q8_g32", "q8_g32", "q8_g32")),
    "v1-q4.cbi": ("q8_g32", ("q4_g32", "q4_g32", "q4_g32")),
    "v1-16-bit.cbi": ("bf16", ("f16", "bf16", "f16")),
}

if __name__ == "__main__":
    for name, (matrices, experts) in FILES.items():
        path = FOLDER / name
        if path.exists():
            print(f"{name} is there and stays")
            continue
        write_tiny(path, matrices, experts, alignment=64)
        print(name, path.stat().st_size)
