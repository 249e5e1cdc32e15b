#!/usr/bin/env python3
"""A router in torch: linear, softmax and top-k of 1024 tokens, 64 experts of 2048 inputs, 8 chosen.

ops_torch.py THREADS
"""

from __future__ import annotations

import sys
import time
from typing import Any

from protocol import serve

ROWS, WIDTH, EXPERTS, CHOSEN, REPEATS = 1024, 2048, 64, 8, 20


class Router:
    def __init__(self) -> None:
        import torch

        torch.set_num_threads(int(sys.argv[1]))
        torch.set_grad_enabled(False)
        self.torch = torch
        self.x, self.weight = torch.randn(ROWS, WIDTH), torch.randn(EXPERTS, WIDTH)
        self.facts = {"torch": torch.__version__}


def answer(router: Router, request: dict[str, Any]) -> dict[str, Any]:
    torch, seconds = router.torch, []
    for _ in range(REPEATS):
        start = time.perf_counter()
        probabilities = torch.softmax(torch.nn.functional.linear(router.x, router.weight), -1)
        weights, _chosen = torch.topk(probabilities, CHOSEN)
        weights /= weights.sum(-1, keepdim=True)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


if __name__ == "__main__":
    serve(Router, answer)
