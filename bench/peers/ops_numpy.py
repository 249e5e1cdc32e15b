#!/usr/bin/env python3
"""A float32 product of NumPy (OpenBLAS): 1024 rows through a matrix of 2048 x 2048."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from protocol import serve

ROWS, WIDTH, REPEATS = 1024, 2048, 5


class Product:
    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.x = random.standard_normal((ROWS, WIDTH), dtype=np.float32)
        self.weight = random.standard_normal((WIDTH, WIDTH), dtype=np.float32)
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
        self.facts = {"blas": f"{blas['name']} {blas['version']}"}


def answer(product: Product, request: dict[str, Any]) -> dict[str, Any]:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        np.matmul(product.x, product.weight.T)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


if __name__ == "__main__":
    serve(Product, answer)
