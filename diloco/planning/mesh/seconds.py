"""Seconds of an inner step on GPUs of a known kind, from their makers' data sheets: for `diloco
mesh --gpu`.

This module does not import torch.
"""

from dataclasses import dataclass

from rich.table import Table

from diloco.planning.mesh.gpus import Gpu, find_fabric, find_gpu
from diloco.planning.mesh.traffic import TrafficLine, plain_table, traffic_lines
from inner.flops import flops_per_token
from inner.measure.workload import Workload

MFU = 0.4
"""Assumed model FLOPs utilisation of inner steps: a value that tuned trainers reach on GPUs."""
GPUS_OF_A_NODE = 8
DEFAULT_FABRIC = "infiniband-ndr"


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind, eight to a node, and the links between nodes."""

    gpu_name: str
    gpu: Gpu
    fabric_name: str
    fabric_bytes: float
    """Bytes per second and direction of a GPU's link to other nodes."""


def find_hardware(gpu: str, fabric: str | None) -> Hardware:
    """Return the GPUs and links of these names. Raises InputError that lists the known names."""
    fabric = fabric or DEFAULT_FABRIC
    return Hardware(gpu.lower(), find_gpu(gpu), fabric.lower(), find_fabric(fabric))


def compute_seconds(work: Workload, tokens_per_step: int, flops: float) -> float:
    """Return the seconds of a step's operations at MFU of each rank's peak `flops`. Recomputation
    is not included.
    """
    total = flops_per_token(work.sizes, work.seq_len).total * tokens_per_step
    return total / (work.degrees.num_ranks * flops * MFU)


def spans_nodes(line: TrafficLine) -> bool:
    """Return whether a group of ranks that communicate is on several nodes."""
    return any(
        min(group) // GPUS_OF_A_NODE != max(group) // GPUS_OF_A_NODE for group in line.groups
    )


def seconds_table(work: Workload, tokens_per_step: int, hardware: Hardware) -> Table:
    """Return a table of the time for computing, and for each axis's traffic alone at the full rate
    of its link.
    """
    gpu = hardware.gpu
    table = plain_table(("what", "by"), ("seconds",))
    rate = f"{MFU:.0%} of {gpu.flops / 1e12:.0f} TFLOP/s per rank"
    table.add_row("compute", rate, f"{compute_seconds(work, tokens_per_step, gpu.flops):.3g}")
    for line in traffic_lines(work):
        if line.calls:
            name = hardware.fabric_name
            speed = hardware.fabric_bytes
            if not spans_nodes(line):
                name = f"{hardware.gpu_name}'s own link"
                speed = gpu.link_bytes
            by = f"{name}, {speed / 1e9:.3g} GB/s"
            table.add_row(f"{line.axis}: {line.what}", by, f"{line.sent_bytes / speed:.3g}")
    return table
