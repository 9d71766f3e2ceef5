"""How fast one core of this machine does the outer loop's own work, measured on one part."""

import time
from collections.abc import Callable
from functools import cache

import torch

from diloco.planning.predict import HostSpeed
from outer.coding import coding_of
from outer.config import OuterConfig
from outer.digest import part_digest
from outer.merges.mean import WeightedSum
from outer.optim import OuterOptimizer

ACTION_SECONDS = 0.02
"""Spent on measuring each thing."""
MAX_ELEMENTS = 1 << 18
COPIED_ELEMENTS = 1 << 22
"""A model does not fit into the processor's cache."""
MESSAGE_SECONDS = 0.0004
"""Not measured here but on a virtual machine, over gloo: it takes several processes."""


def measure(outer: OuterConfig) -> HostSpeed:
    """Of the run's codec and optimizer; takes a quarter of a second, once. Of what else will run it knows nothing."""
    shape = {"codec": outer.codec, "coding": outer.coding, "optimizer": outer.optimizer}
    part_elements = min(outer.part_elements, MAX_ELEMENTS)
    return _measured(OuterConfig(part_elements=part_elements, **shape).model_dump_json())


@cache
def _measured(outer_json: str) -> HostSpeed:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(OuterConfig.model_validate_json(outer_json))
    finally:
        torch.set_num_threads(num_threads)


def _measure(outer: OuterConfig) -> HostSpeed:
    num_elements = outer.part_elements
    codec = coding_of(outer).codec
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    payload = codec.encode(values).clone()
    total, optimizer = WeightedSum(num_elements), OuterOptimizer({0: values.clone()}, outer.optimizer)
    # Allocated here: an island's memory is its own after the first round, a new process waits for the system's.
    local, gathered, difference = (torch.zeros(COPIED_ELEMENTS) for _ in range(3))
    wide = torch.empty(num_elements, dtype=torch.float64)

    def snapshot() -> None:
        torch.sub(local, gathered.copy_(local), out=difference)
        for part in difference.split(num_elements):
            wide[: part.numel()].copy_(part).square_().sum().item()

    def step() -> None:
        optimizer.step({0: values})
        part_digest(torch.cat([values, values]))

    def write() -> None:
        local.copy_(gathered.copy_(difference))

    def per_element(action: Callable[[], object], elements: int = num_elements) -> float:
        return _seconds(action) / elements

    return HostSpeed(
        encode=per_element(lambda: codec.encode(values)),
        decode=per_element(lambda: codec.decode(payload, num_elements)),
        merge=per_element(lambda: total.add(values, 0.5)),
        snapshot=per_element(snapshot, COPIED_ELEMENTS),
        step=per_element(step),
        write=per_element(write, COPIED_ELEMENTS),
        digest=_seconds(lambda: part_digest(values)) / values.nbytes,
        message=MESSAGE_SECONDS,
    )


def _seconds(action: Callable[[], object]) -> float:
    """Time of a call on this thread, the best of several: what else runs here does not count."""
    action()
    taken: list[float] = []
    until = time.thread_time() + ACTION_SECONDS
    while not taken or time.thread_time() < until:
        started_at = time.thread_time()
        action()
        taken.append(time.thread_time() - started_at)
    return min(taken)
