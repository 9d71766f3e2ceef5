"""The machine: devices, driver, versions, limits, and the measured peak of matrix products."""

import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.cuda import nccl

from inner.measure.peak_flops import peak_flops
from scripts.gpu_report.place import Place, Row, guarded

QUERY = "driver_version,name,memory.total,clocks.max.sm,power.limit,pcie.link.gen.max"
TOOL_SECONDS = 20.0


def describe(place: Place) -> Iterator[Row]:
    yield from guarded("versions", versions)
    yield from guarded("host", describe_host)
    if not place.is_tiny:
        for index in range(place.num_devices):
            yield from guarded(f"cuda:{index}", lambda index=index: describe_device(index))
        yield from guarded(
            "nvidia-smi",
            lambda: {"says": ask("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")},
        )
        yield from guarded("links", lambda: {"says": ask("nvidia-smi", "topo", "-m")})
    for dtype in ("bfloat16", "float32"):
        yield from guarded(f"matmul {dtype}", lambda dtype=dtype: measure_peak(place, dtype))


def versions() -> Row:
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())) if has_nccl else None,
    }


def describe_host() -> Row:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "ram_GB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        "open_files": f"{soft} (at most {hard})",
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_GB": None if shared is None else shared.f_bavail * shared.f_frsize / 1e9,
        "kernel": platform.release(),
    }


def describe_device(index: int) -> Row:
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory_GB": total / 1e9,
        "free_GB": free / 1e9,
    }


def ask(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True
    ).stdout.strip()


def measure_peak(place: Place, dtype: str) -> Row:
    peak = peak_flops(place.first, dtype)
    return {"TFLOPs_per_s": None if peak is None else peak / 1e12}
