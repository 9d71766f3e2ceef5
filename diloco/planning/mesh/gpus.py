"""Data sheets of common GPUs and fabrics, for plans: nothing here was measured. Does not import
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from diloco.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """A GPU by its maker's data sheet."""

    flops: float
    """Operations per second of dense matrix products in bf16, summed in fp32. Data sheets often
    print twice this number, for sparse matrices."""
    memory_bytes: float
    memory_rate: float
    """Bytes per second between the GPU's memory and its processors."""
    link_bytes: float
    """Bytes per second in one direction to the other GPUs of its node, by its fastest link."""
    source: str
    names: tuple[str, ...]
    """Names that the driver has for this model. A part of a card (MIG) and models of another speed
    have other names."""


GPUS = {
    "a100": Gpu(
        312e12,
        80e9,
        2039e9,
        300e9,
        "NVIDIA A100 80GB SXM data sheet; NVLink 3",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    ),
    "a100-40gb": Gpu(
        312e12,
        40e9,
        1555e9,
        300e9,
        "NVIDIA A100 40GB SXM data sheet; NVLink 3",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    ),
    "h100": Gpu(
        989e12,
        80e9,
        3350e9,
        450e9,
        "NVIDIA H100 SXM data sheet; NVLink 4",
        ("NVIDIA H100 80GB HBM3",),
    ),
    "h200": Gpu(
        989e12, 141e9, 4800e9, 450e9, "NVIDIA H200 SXM data sheet; NVLink 4", ("NVIDIA H200",)
    ),
    "b200": Gpu(
        2250e12, 180e9, 8000e9, 900e9, "NVIDIA HGX B200 data sheet; NVLink 5", ("NVIDIA B200",)
    ),
    "l40s": Gpu(
        362e12, 48e9, 864e9, 32e9, "NVIDIA L40S data sheet; PCIe 4.0 x16", ("NVIDIA L40S",)
    ),
    "rtx4090": Gpu(
        165e12,
        24e9,
        1008e9,
        32e9,
        "NVIDIA Ada architecture white paper; PCIe 4.0 x16",
        ("NVIDIA GeForce RTX 4090",),
    ),
    "rtx3090": Gpu(
        71e12,
        24e9,
        936e9,
        32e9,
        "NVIDIA GA102 architecture white paper; PCIe 4.0 x16",
        ("NVIDIA GeForce RTX 3090",),
    ),
    "mi300x": Gpu(
        1307e12,
        192e9,
        5300e9,
        448e9,
        "AMD Instinct MI300X data sheet; Infinity Fabric, seven links",
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
    ),
}

FABRICS = {
    "infiniband-hdr": 25e9,
    "infiniband-ndr": 50e9,
    "ethernet-400": 50e9,
    "ethernet-100": 12.5e9,
    "ethernet-25": 3.125e9,
    "ethernet-10": 1.25e9,
}
"""Rate of a link between nodes, in bytes per second and direction of one port. Each GPU is assumed
to have one port. From the standards: InfiniBand HDR and NDR with four lanes, IEEE 802.3."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name. Raises ConfigError that lists the known names."""
    return _find(name, GPUS, "GPU")


def find_sheet(device_name: str) -> Gpu | None:
    """Return the data sheet of the GPU that the driver calls `device_name`; None if GPUS has
    none.
    """
    return next((gpu for gpu in GPUS.values() if device_name in gpu.names), None)


def find_fabric(name: str) -> float:
    """Return the bytes per second and direction of the fabric. Raises ConfigError that lists the
    known names.
    """
    return _find(name, FABRICS, "fabric")


def _find(name: str, known: Mapping[str, T], what: str) -> T:
    if name.lower() not in known:
        raise ConfigError(f"got {name!r}, which is not a known {what}; allowed: {', '.join(known)}")
    return known[name.lower()]
