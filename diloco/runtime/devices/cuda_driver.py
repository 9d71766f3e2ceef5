"""Query NVIDIA's driver about itself and the GPUs that this process may use.

The driver's library is called directly, because it opens no context on a GPU, as torch would for
the same answers. Importing this does not import torch.
"""

import re
from ctypes import CDLL, byref, c_char_p, c_int, create_string_buffer
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "libcuda.so.1"
VERSION_FILE = Path("/proc/driver/nvidia/version")
MAX_NAME_BYTES = 256
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76
"""Numbers in cuda.h of the attributes for the compute capability."""
NO_DEVICE = 100
"""The status if CUDA_VISIBLE_DEVICES leaves no GPU. It does not mean that the driver has a
problem."""


@dataclass(frozen=True)
class Card:
    """A GPU as CUDA describes it."""

    name: str
    capability: tuple[int, int]
    """The GPU's compute capability: (9, 0) for an H100."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether the GPU multiplies in bf16. GPUs before Ampere only emulate it, which is slow."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class CudaDriver:
    """The driver, and the GPUs that CUDA_VISIBLE_DEVICES leaves, in torch's order."""

    version: str
    cuda: tuple[int, int]
    """The newest version of CUDA that the driver supports."""
    problem: str = ""
    """Name of the error if the driver did not start; empty if it has started."""
    cards: tuple[Card, ...] = ()


def ask_cuda_driver(library: str = LIBRARY) -> CudaDriver | None:
    """Return the state of the driver; None if no driver is installed."""
    try:
        cuda = CDLL(library)
        number = c_int()
        count = c_int()
    except OSError:
        return None
    cuda.cuDriverGetVersion(byref(number))
    version = _read_version(VERSION_FILE)
    newest = (number.value // 1000, number.value % 1000 // 10)
    if status := cuda.cuInit(0) or cuda.cuDeviceGetCount(byref(count)):
        return CudaDriver(version, newest, "" if status == NO_DEVICE else _error_name(cuda, status))
    return CudaDriver(
        version, newest, cards=tuple(_read_card(cuda, number) for number in range(count.value))
    )


def _read_card(cuda: CDLL, number: int) -> Card:
    card = c_int()
    name = create_string_buffer(MAX_NAME_BYTES)
    major = c_int()
    minor = c_int()
    cuda.cuDeviceGet(byref(card), number)
    cuda.cuDeviceGetName(name, MAX_NAME_BYTES, card)
    cuda.cuDeviceGetAttribute(byref(major), CAPABILITY_MAJOR, card)
    cuda.cuDeviceGetAttribute(byref(minor), CAPABILITY_MINOR, card)
    return Card(name.value.decode(errors="replace"), (major.value, minor.value))


def _error_name(cuda: CDLL, status: int) -> str:
    name = c_char_p()
    cuda.cuGetErrorName(status, byref(name))
    return name.value.decode(errors="replace") if name.value else f"error {status}"


def _read_version(path: Path) -> str:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text())
    except OSError:
        found = None
    return found[0] if found else "of unknown version"
