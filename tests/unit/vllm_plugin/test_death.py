"""Why a server ended, from what vLLM logs and how its processes end: the texts are vLLM's and torch's own."""

from __future__ import annotations

import pytest

from kvortex.vllm_plugin.death import Death, explain
from kvortex.vllm_plugin.last_words import LastWord

CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.1 GiB is free."
)
START_FAILED = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"
)


def word(process: str, message: str, error_type: str = "", error: str = "", at: float = 1000.0) -> LastWord:
    return LastWord(at, process, message, error_type, error)


def failed_start(error_type: str, error: str) -> list[LastWord]:
    """A worker fails, and its engine with it."""
    return [
        word("VllmWorker-0", "WorkerProc failed to start.", error_type, error),
        word(
            "EngineCore",
            "EngineCore failed to start.",
            "Exception",
            "WorkerProc initialization failed due to an exception in a background process. "
            "See stack trace for root cause.",
            at=1001.0,
        ),
    ]


def told(
    words: list[LastWord],
    exits: dict[str, int] | None = None,
    error: BaseException | None = None,
    *,
    oom_killed: bool = False,
) -> Death:
    death = explain(words, exits or {}, error, oom_killed=oom_killed)
    assert death is not None
    return death


@pytest.mark.parametrize("exits", [{}, {"EngineCore": 0}, {"EngineCore": -15, "p": -2}, {"EngineCore": 143}])
def test_an_end_on_request_is_no_death(exits: dict[str, int]) -> None:
    assert explain([], exits, None, oom_killed=False) is None
    # Neither is a request that failed, nor somebody else's death.
    logged = [word("EngineCore", "Error in a request", "ValueError", "bad")]
    assert explain(logged, exits, None, oom_killed=True) is None


def test_whom_vllm_kills_when_the_time_to_end_is_over_has_not_died() -> None:
    forced = word("MainProcess", "[shutdown] Process manager: force killing remaining processes count=1", at=1000.0)
    echo = word("EngineCore", "Worker proc VllmWorker-0 died unexpectedly, shutting down executor.", at=1000.1)
    assert explain([forced, echo], {"EngineCore": -9}, None, oom_killed=False) is None
    # One of two was killed by somebody else, before or after.
    assert "was killed" in told([forced], {"EngineCore_DP0": -9, "EngineCore_DP1": -9}).message
    # A cause from before stays one.
    cause = word("EngineCore", "EngineCore encountered a fatal error.", "OutOfMemoryError", CUDA_OOM, at=999.0)
    assert "out of memory" in told([cause, forced], {"EngineCore": -9}).message
    assert "SIGSEGV" in told([forced], {"EngineCore": -11}).message


@pytest.mark.parametrize(
    ("error_type", "error", "kind", "fix"),
    [
        ("OutOfMemoryError", CUDA_OOM, "the GPU is out of memory", "--gpu-memory-utilization"),
        ("RuntimeError", "CUDA error: out of memory", "the GPU is out of memory", "--gpu-memory-utilization"),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "a CUDA error", "Xid"),
        ("RuntimeError", "CUDA error: device-side assert triggered", "a CUDA error", "CUDA_LAUNCH_BLOCKING=1"),
        ("MemoryError", "", "the host is out of memory", "kv_cache.ram_cache_size"),
        ("OSError", "[Errno 12] Cannot allocate memory", "the host is out of memory", "kv_cache.ram_cache_size"),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 900000000000 bytes. Error code 12 (Cannot allocate memory)",
            "the host is out of memory",
            "kv_cache.ram_cache_size",
        ),
        ("OSError", "[Errno 28] No space left on device", "a disk or /dev/shm is full", "--shm-size"),
        (
            "RuntimeError",
            "Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 64 MiB free.",
            "a disk or /dev/shm is full",
            "--shm-size",
        ),
        (
            "ValueError",
            "Free memory on device cuda:0 (10.2/139.8 GiB) on startup is less than desired GPU memory utilization",
            "others use the GPU's memory",
            "nvidia-smi",
        ),
        (
            "ValueError",
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "no room for the KV cache",
            "--max-model-len",
        ),
    ],
)
def test_a_kind_of_failure_is_named_with_its_fix(error_type: str, error: str, kind: str, fix: str) -> None:
    death = told(failed_start(error_type, error), {"EngineCore": 1}, START_FAILED)
    assert death.message.startswith("a worker (VllmWorker-0) failed: ")
    assert kind in death.message
    assert error.splitlines()[0] in death.message if error else True
    assert fix in death.hint
    assert "root cause" not in death.message


def test_an_engine_that_fails_by_itself_is_named() -> None:
    words = [word("EngineCore", "EngineCore encountered a fatal error.", "OutOfMemoryError", CUDA_OOM)]
    assert told(words).message.startswith("the engine (EngineCore) failed: the GPU is out of memory")


def test_kvortex_s_own_refusal_is_passed_on_with_its_hint() -> None:
    words = failed_start(
        "UnfitError", "KVortex cannot restore the KV of MambaSpec layers\nhint: kv_cache.backend: none"
    )
    death = told(words, error=START_FAILED)
    assert death.message.endswith("KVortex cannot restore the KV of MambaSpec layers")
    assert death.hint == "kv_cache.backend: none"


def test_any_other_error_is_repeated_in_one_line() -> None:
    death = told(failed_start("KeyError", "'layer.0'\nsecond line"), error=START_FAILED)
    assert death.message == "a worker (VllmWorker-0) failed: KeyError: 'layer.0'"


@pytest.mark.parametrize(
    ("code", "oom_killed", "said", "fix"),
    [
        (-9, True, "out of memory", "kv_cache.ram_cache_size"),
        (-9, False, "was killed (SIGKILL)", "dmesg"),
        (-7, False, "crashed (SIGBUS)", "--shm-size"),
        (-11, False, "crashed (SIGSEGV)", "native code"),
    ],
)
def test_a_signal_is_named_wherever_it_is_known_from(code: int, oom_killed: bool, said: str, fix: str) -> None:
    at_start = RuntimeError(f"Engine core initialization failed. Failed core proc(s): {{'EngineCore': {code}}}")
    for death in (
        told([], {"EngineCore": code}, oom_killed=oom_killed),
        told([], {}, at_start, oom_killed=oom_killed),
    ):
        assert death.message.startswith("the engine (EngineCore) ")
        assert said in death.message
        assert fix in death.hint


def test_a_killed_worker_is_named_and_not_the_engine_that_follows_it() -> None:
    words = [
        word(
            "EngineCore", "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", at=1000
        ),
        word("EngineCore", "EngineCore encountered a fatal error.", "RuntimeError", "Executor failed.", at=1001),
    ]
    death = told(words, {"EngineCore": 1}, oom_killed=True)
    assert death.message.startswith("a worker (VllmWorker-1) was ended by the kernel")


@pytest.mark.parametrize(
    ("exit_code", "oom_killed", "said"),
    [
        (None, False, "died without a word"),
        (None, True, "out of memory"),
        (-9, False, "SIGKILL"),
        (-7, False, "SIGBUS"),
    ],
)
def test_a_worker_s_code_is_the_kernel_s_where_vllm_asked_too_early(
    exit_code: int | None, oom_killed: bool, said: str
) -> None:
    message = "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."
    words = [
        LastWord(1000.0, "EngineCore", message, "", "", exit_code),
        word("EngineCore", "EngineCore encountered a fatal error.", "RuntimeError", "Executor failed.", at=1000.1),
    ]
    death = told(words, {"EngineCore": 1}, oom_killed=oom_killed)
    assert death.message.startswith("a worker (VllmWorker-0) ")
    assert said in death.message


def test_a_worker_that_said_why_is_believed() -> None:
    words = [
        word("VllmWorker-0", "WorkerProc hit an exception.", "OutOfMemoryError", CUDA_OOM),
        word("EngineCore", "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down", at=1001.0),
    ]
    assert "the GPU is out of memory" in told(words, {"EngineCore": 1}).message


def test_an_abort_that_an_error_led_to_is_told_by_the_error() -> None:
    words = failed_start("AcceleratorError", "CUDA error: unspecified launch failure")
    assert "a CUDA error" in told(words, {"VllmWorker-0": -6}).message
    assert "SIGABRT" in told([], {"VllmWorker-0": -6}).message


def test_an_error_of_long_ago_is_not_the_cause() -> None:
    words = [
        word("EngineCore", "Error in a request", "ValueError", "of an hour ago", at=1000.0),
        word("EngineCore", "EngineCore encountered a fatal error.", "AssertionError", "of now", at=5000.0),
    ]
    assert told(words).message.endswith("AssertionError: of now")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["Value error, max_model_len is too large [type=value_error, input_value=1]"], "Value error, max_model_len"),
        (["max_model_len", "Input should be a valid integer [type=int]"], "max_model_len: Input should be a valid"),
    ],
)
def test_a_configuration_that_vllm_refuses_is_told_by_its_own_line(lines: list[str], said: str) -> None:
    class ValidationError(Exception):
        pass

    further = "    For further information visit https://errors.pydantic.dev"
    error = ValidationError("\n  ".join(["1 validation error for VllmConfig", *lines, further]))
    death = told([], error=error)
    assert death.message.startswith(f"the server failed: ValidationError: {said}")
    assert "type=" not in death.message
    assert "pydantic" not in death.message


def test_an_engine_that_said_nothing_is_told_by_its_exit_code() -> None:
    death = told([], {"EngineCore": 3}, START_FAILED)
    assert death.message == "the engine (EngineCore) ended: exit code 3"
