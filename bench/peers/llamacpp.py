#!/usr/bin/env python3
"""llama.cpp (package llama-cpp-python) or ik_llama.cpp (package ik-llama-cpp-python) on a GGUF file.

The best build of llama.cpp on x86-64 with AMX comes from clang (GCC's native build dies with SIGILL on AMX):
    apt-get install clang-16
    CC=clang-16 CXX=clang++-16 CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=OFF" pip install llama-cpp-python
ik_llama.cpp comes as a wheel. Each needs a virtual environment of its own. The facts say whether AMX is in use: where
the loader put the weights, and whether this build has the instructions.

    llamacpp.py MODEL.gguf [--threads 2] [--ik]
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import time
from typing import Any

import numpy as np
from protocol import serve

ROWS = 512  # tokens of one call, and computed together


class LlamaCpp:
    def __init__(self, path: str, threads: int, ik: bool):
        if ik:
            import ik_llama_cpp._ctypes_api as api  # pyright: ignore[reportMissingImports] - a peer, not a dependency

            library = api._lib
        else:
            import llama_cpp as api  # pyright: ignore[reportMissingImports] - a peer, not a dependency
            import llama_cpp.llama_cpp as binding  # pyright: ignore[reportMissingImports]

            library = binding._lib
        self.api, self.ik, self.threads = api, ik, threads
        self.log: list[str] = []
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self.callback = kind(lambda level, text, data: self.log.append(text.decode(errors="replace")))
        library.llama_log_set.argtypes, library.llama_log_set.restype = [kind, ctypes.c_void_p], None
        library.llama_log_set(self.callback, None)
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        if ik:  # its own fastest way: weights interleaved at load time
            parameters.repack_tensors, parameters.use_mmap = True, False
        self.model = api.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            sys.stderr.write("".join(self.log))
            raise SystemExit(f"cannot load {path}")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(ROWS, 0, 1)
        api.llama_free(self.context(1, 64))  # loading is not over before a context can be had
        library.llama_print_system_info.restype = ctypes.c_char_p
        system = library.llama_print_system_info().decode()
        log = "".join(self.log)
        buffers = dict(re.findall(r"(\S+) (?:model )?buffer size = +([0-9.]+) MiB", log))
        self.facts: dict[str, Any] = {
            "amx": "AMX_INT8 = 1" in system and float(buffers.get("AMX", 0)) > 0,
            "buffers_mib": {name: float(size) for name, size in buffers.items()},
            "features": re.findall(r"(\w+) = 1", system),
        }

    def context(self, sequences: int, positions: int) -> Any:
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx = sequences * positions
        parameters.n_batch = parameters.n_ubatch = ROWS
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = self.threads
        if self.ik:  # an assertion in flash attention ends the wheel's AVX2 build on prompts of 256
            parameters.fused_moe_up_gate, parameters.flash_attn = True, False
        context = self.api.llama_init_from_model(self.model, parameters)
        if not context:
            sys.stderr.write("".join(self.log))
            raise SystemExit("no context could be made")
        return context

    def decode(self, context: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        """entries: (token, position, sequence, wants logits); waits for the logits of the last."""
        batch = self.batch
        for i, (token, position, sequence, logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, logits
        batch.n_tokens = len(entries)
        if self.api.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        if entries[-1][3]:
            pointer = self.api.llama_get_logits_ith(context, len(entries) - 1)
            np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocabulary,)).argmax()

    def run(self, ids: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
        batch, length = ids.shape
        context = self.context(batch, (length + len(steps) + 63) // 64 * 64)
        try:
            start = time.perf_counter()
            for sequence, prompt in enumerate(ids.tolist()):
                for first in range(0, length, ROWS):
                    part = enumerate(prompt[first : first + ROWS], first)
                    self.decode(context, [(token, at, sequence, at == length - 1) for at, token in part])
            prompt_s, seconds = time.perf_counter() - start, []
            for at, step in enumerate(steps.tolist(), length):
                start = time.perf_counter()
                self.decode(context, [(token, at, sequence, True) for sequence, token in enumerate(step)])
                seconds.append(time.perf_counter() - start)
            return {"prompt_s": prompt_s, "step_s": seconds}
        finally:
            self.api.llama_free(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ik", action="store_true", help="ik_llama.cpp instead of llama.cpp")
    arguments = parser.parse_args()
    serve(lambda: LlamaCpp(arguments.model, arguments.threads, arguments.ik))


if __name__ == "__main__":
    main()
