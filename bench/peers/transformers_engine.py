#!/usr/bin/env python3
"""transformers on a Hugging Face folder, in bf16 or float32, eager or compiled.

Needs torch and transformers. Compiled: torch.compile over a cache of fixed size, as transformers documents it.

    transformers_engine.py FOLDER [--threads 2] [--dtype bf16|f32] [--compile]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from protocol import serve


class Transformers:
    def __init__(self, path: str, threads: int, dtype: str, compile: bool):
        import torch
        import transformers

        self.torch, self.transformers, self.compile = torch, transformers, compile
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        kind = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()
        self.forward = torch.compile(self.model.forward, dynamic=False) if compile else self.model.forward
        self.vocabulary = self.model.config.vocab_size
        implementation = getattr(self.model.config, "_experts_implementation", None)
        self.facts: dict[str, Any] = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "experts": implementation,
            "capability": torch.backends.cpu.get_cpu_capability(),
        }

    def cache(self, positions: int) -> Any:
        if self.compile:
            return self.transformers.StaticCache(config=self.model.config, max_cache_len=positions)
        return self.transformers.DynamicCache(config=self.model.config)

    def call(self, ids: np.ndarray, cache: Any, first: int) -> None:
        torch = self.torch
        out = self.forward(
            input_ids=torch.from_numpy(np.ascontiguousarray(ids)),
            past_key_values=cache,
            position_ids=torch.arange(first, first + ids.shape[1])[None].expand(len(ids), -1),
            use_cache=True,
            logits_to_keep=1,
        )
        out.logits.argmax(-1).tolist()

    def run(self, ids: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
        length = ids.shape[1]
        cache = self.cache(length + len(steps))
        start = time.perf_counter()
        self.call(ids, cache, 0)
        prompt_s, seconds = time.perf_counter() - start, []
        for at, step in enumerate(steps, length):
            start = time.perf_counter()
            self.call(step[:, None], cache, at)
            seconds.append(time.perf_counter() - start)
        return {"prompt_s": prompt_s, "step_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    serve(lambda: Transformers(arguments.model, arguments.threads, arguments.dtype, arguments.compile))


if __name__ == "__main__":
    main()
