"""The one module that talks to the C core (csrc/include/colibri.h) through ctypes."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

from colibri.errors import (
    BusyError,
    CancelledError,
    ColibriError,
    ContextLengthError,
    ModelFileError,
    NonFiniteError,
    OutOfMemoryError,
    StateError,
    UnsupportedModelError,
    UsageError,
)

ABI_VERSION = 3
MESSAGE_SIZE = 512
TOP_LOGPROBS = 20
OP_KINDS = 32
PHASES = ("prompt", "decode")
OK = 0
UNSUPPORTED = 4
OUT_OF_MEMORY = 5
BUSY = 6

_ERRORS: dict[int, type[ColibriError]] = {
    1: UsageError,
    2: ModelFileError,
    3: ModelFileError,
    UNSUPPORTED: UnsupportedModelError,
    OUT_OF_MEMORY: OutOfMemoryError,
    BUSY: BusyError,
    7: CancelledError,
    8: NonFiniteError,
    9: ContextLengthError,
    10: ColibriError,
    11: StateError,
}


class RuntimeOptions(c.Structure):
    _fields_ = (("threads", c.c_uint32), ("cpu", c.c_char_p), ("system_root", c.c_char_p), ("pin", c.c_uint32))


class EngineOptions(c.Structure):
    _fields_ = (
        ("max_batch_tokens", c.c_uint32),
        ("io_threads", c.c_uint32),
        ("io", c.c_uint32),
        ("verify", c.c_uint32),
        ("huge_pages", c.c_uint32),
        ("prefetch_depth", c.c_uint32),
        ("lock_memory", c.c_uint32),
        ("guard", c.c_uint32),
        ("expert_bytes", c.c_uint64),
        ("state_bytes", c.c_uint64),
        ("page_cache_bytes", c.c_uint64),
    )


class EngineInfo(c.Structure):
    _fields_ = (
        ("vocabulary_size", c.c_uint32),
        ("context_limit", c.c_uint32),
        ("layer_count", c.c_uint32),
        ("expert_set_count", c.c_uint32),
        ("default_state_format", c.c_uint32),
        ("max_batch_tokens", c.c_uint32),
        ("weight_bytes", c.c_uint64),
        ("expert_bytes", c.c_uint64),
        ("scratch_bytes", c.c_uint64),
        ("digest", c.c_uint8 * 32),
        ("all_expert_bytes", c.c_uint64),
        ("token_expert_bytes", c.c_uint64),
    )


class SessionOptions(c.Structure):
    _fields_ = (("context", c.c_uint32), ("state_format", c.c_uint32))


class MemoryPlan(c.Structure):
    _fields_ = (
        ("tensor_bytes", c.c_uint64),
        ("scratch_bytes", c.c_uint64),
        ("other_bytes", c.c_uint64),
        ("session_bytes", c.c_uint64),
        ("all_expert_bytes", c.c_uint64),
        ("least_expert_bytes", c.c_uint64),
        ("wasted_expert_bytes", c.c_uint64),
        ("largest_layer_bytes", c.c_uint64),
        ("token_expert_bytes", c.c_uint64),
        ("expert_count", c.c_uint32),
        ("expert_set_count", c.c_uint32),
        ("vocabulary_size", c.c_uint32),
        ("context_limit", c.c_uint32),
    )


class Item(c.Structure):
    _fields_ = (
        ("session", c.c_void_p),
        ("tokens", c.c_void_p),
        ("token_count", c.c_uint32),
        ("logits_mode", c.c_uint32),
        ("logits", c.c_void_p),
        ("scores", c.c_void_p),
        ("status", c.c_int),
        ("message", c.c_char * MESSAGE_SIZE),
    )


class Sampling(c.Structure):
    _fields_ = (
        ("temperature", c.c_float),
        ("top_k", c.c_uint32),
        ("top_p", c.c_float),
        ("min_p", c.c_float),
        ("repetition_penalty", c.c_float),
        ("frequency_penalty", c.c_float),
        ("presence_penalty", c.c_float),
        ("top_logprobs", c.c_uint32),
        ("seed", c.c_uint64),
    )


class SampleResult(c.Structure):
    _fields_ = (
        ("token", c.c_uint32),
        ("logprob", c.c_float),
        ("top_tokens", c.c_uint32 * TOP_LOGPROBS),
        ("top_logprobs", c.c_float * TOP_LOGPROBS),
    )


class Latency(c.Structure):
    _fields_ = (
        ("count", c.c_uint64),
        ("sum", c.c_uint64),
        ("p50", c.c_uint64),
        ("p99", c.c_uint64),
        ("largest", c.c_uint64),
    )


class PhaseStats(c.Structure):
    _fields_ = (
        ("tokens", c.c_uint64),
        ("passes", c.c_uint64),
        ("nanoseconds", c.c_uint64),
        ("parallel_regions", c.c_uint64),
        ("dispatch", Latency),
        ("dispatch_switched", Latency),
        ("dispatch_missed", c.c_uint64),
    )


class Stats(c.Structure):
    _fields_ = (
        ("tokens", c.c_uint64),
        ("passes", c.c_uint64),
        ("nanoseconds", c.c_uint64),
        ("op_nanoseconds", c.c_uint64 * OP_KINDS),
        ("cpu", c.c_char * 16),
        ("matmul", (c.c_char * 32) * 16),
        ("phases", PhaseStats * len(PHASES)),
        ("resident", c.c_uint32),
        ("is_direct", c.c_uint32),
        ("direct_bytes_per_second", c.c_uint64),
        ("buffered_bytes_per_second", c.c_uint64),
        ("predicted_passes", c.c_uint64),
        ("unpredicted_passes", c.c_uint64),
        ("prediction_nanoseconds", c.c_uint64),
        ("warning", c.c_char * MESSAGE_SIZE),
    )


class ExpertSetStats(c.Structure):
    _fields_ = (
        ("layer", c.c_uint32),
        ("expert_count", c.c_uint32),
        ("experts_computed", c.c_uint64),
        ("expert_tokens", c.c_uint64),
        ("bytes_touched", c.c_uint64),
        ("hits", c.c_uint64),
        ("misses", c.c_uint64),
        ("bytes_read", c.c_uint64),
        ("stall_nanoseconds", c.c_uint64),
        ("prefetched", c.c_uint64),
        ("prefetched_used", c.c_uint64),
        ("evictions", c.c_uint64),
        ("load_nanoseconds", c.c_uint64),
        ("predictable", c.c_uint64),
        ("predicted", c.c_uint64),
        ("recalled", c.c_uint64),
    )


_MESSAGE = (c.c_char_p, c.c_size_t)
_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "colibri_abi_version": (c.c_uint32, ()),
    "colibri_init": (c.c_int, (c.POINTER(RuntimeOptions), c.POINTER(c.c_void_p), *_MESSAGE)),
    "colibri_free": (c.c_int, (c.c_void_p,)),
    "colibri_thread_count": (c.c_uint32, (c.c_void_p,)),
    "colibri_cpu_name": (c.c_char_p, (c.c_void_p,)),
    "colibri_engine_open": (
        c.c_int,
        (c.c_void_p, c.c_char_p, c.POINTER(EngineOptions), c.POINTER(c.c_void_p), *_MESSAGE),
    ),
    "colibri_engine_close": (c.c_int, (c.c_void_p,)),
    "colibri_engine_get_info": (None, (c.c_void_p, c.POINTER(EngineInfo))),
    "colibri_engine_guard": (c.c_int, (c.c_void_p, *_MESSAGE)),
    "colibri_engine_warm": (c.c_int, (c.c_void_p, c.c_uint32, c.c_void_p, c.c_uint32, *_MESSAGE)),
    "colibri_plan_memory": (
        c.c_int,
        (
            c.c_void_p,
            c.c_char_p,
            c.POINTER(EngineOptions),
            c.POINTER(SessionOptions),
            c.POINTER(MemoryPlan),
            *_MESSAGE,
        ),
    ),
    "colibri_validate": (c.c_int, (c.c_char_p, *_MESSAGE)),
    "colibri_session_open": (
        c.c_int,
        (c.c_void_p, c.POINTER(SessionOptions), c.POINTER(c.c_void_p), *_MESSAGE),
    ),
    "colibri_session_close": (c.c_int, (c.c_void_p,)),
    "colibri_position": (c.c_uint32, (c.c_void_p,)),
    "colibri_context": (c.c_uint32, (c.c_void_p,)),
    "colibri_tokens": (c.POINTER(c.c_uint32), (c.c_void_p,)),
    "colibri_truncate": (c.c_int, (c.c_void_p, c.c_uint32, *_MESSAGE)),
    "colibri_cancel": (None, (c.c_void_p,)),
    "colibri_state_size": (c.c_uint64, (c.c_void_p,)),
    "colibri_state_save": (c.c_int, (c.c_void_p, c.c_void_p, c.c_uint64, *_MESSAGE)),
    "colibri_state_restore": (c.c_int, (c.c_void_p, c.c_void_p, c.c_uint64, *_MESSAGE)),
    "colibri_forward_batch": (c.c_int, (c.c_void_p, c.POINTER(Item), c.c_uint32, *_MESSAGE)),
    "colibri_sample_scratch_size": (c.c_uint64, (c.c_uint32,)),
    "colibri_sample": (
        c.c_int,
        (
            c.POINTER(Sampling),
            c.c_void_p,
            c.c_uint32,
            c.c_void_p,
            c.c_void_p,
            c.c_uint32,
            c.c_uint32,
            c.c_uint64,
            c.c_void_p,
            c.POINTER(SampleResult),
            *_MESSAGE,
        ),
    ),
    "colibri_get_stats": (None, (c.c_void_p, c.POINTER(Stats))),
    "colibri_get_profile": (c.c_int, (c.c_void_p, c.c_int, c.c_void_p)),
    "colibri_get_expert_stats": (
        c.c_int,
        (c.c_void_p, c.c_uint32, c.POINTER(ExpertSetStats), c.c_void_p),
    ),
    "colibri_get_expert_loads": (c.c_int, (c.c_void_p, c.c_uint32, c.c_void_p, c.c_void_p)),
}


def _load() -> c.CDLL:
    path = Path(__file__).resolve().parent.parent / "libcolibri.so"
    try:
        library = c.CDLL(str(path))
        found = library.colibri_abi_version()
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise ColibriError(f"cannot load the core {path}: {error}; install the package again: pip install .") from None
    if found != ABI_VERSION:
        raise ColibriError(
            f"the core {path} has interface version {found} and this package needs {ABI_VERSION}; "
            "install the package again: pip install ."
        )
    return library


library = _load()


def release_free_memory() -> None:
    """Give memory that was freed back to the system, as far as the C library can."""
    trim = getattr(c.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def message_buffer() -> c.Array[c.c_char]:
    return c.create_string_buffer(MESSAGE_SIZE)


def error_of(status: int, message: bytes, where: type[ColibriError] | None = None) -> ColibriError:
    """The exception for a status; `where` replaces the class for UNSUPPORTED."""
    kind = where if where is not None and status == UNSUPPORTED else _ERRORS.get(status, ColibriError)
    return kind(message.decode("utf-8", "replace") or f"the core failed with status {status}")


def check(status: int, message: c.Array[c.c_char], where: type[ColibriError] | None = None) -> None:
    """Raise the exception for a status other than OK."""
    if status != OK:
        raise error_of(status, message.value, where)
