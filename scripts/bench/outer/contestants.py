"""The contestants of `scripts/bench/outer/outer.py`: reduces, and whole synchronisations of DiLoCo.

Each object is one island of a group. A synchronisation begins with the local params after inner
steps, and ends when the next global params have replaced them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

SETUP_SECONDS = 60.0
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""The outer optimizer of every synchronisation."""
LAYER = (512, 2048)
CHECKED = 4096
"""Number of elements of a synchronisation's result that are compared with the expected ones."""
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "int8": 2e-2, "int4": 0.3}
"""Largest relative error of a synchronisation's result, by codec."""


class WrongResult(Exception):
    """A contestant reported success, but its result is wrong."""


@dataclass(frozen=True)
class IslandSpec:
    """One island of the group."""

    index: int
    num_islands: int
    num_params: int
    codec: str
    host: str
    bootstrap: list[str]
    """The `bootstrap` of island 0; empty for island 0 itself."""
    relays: Sequence[str] = ()
    """Relays through which alone the other islands reach this one, or none."""

    def values(self, index: int | None = None) -> torch.Tensor:
        """Return the fp32 values of an island, by default of this one.

        They are what the island reduces, and the progress of its inner steps.
        """
        generator = torch.Generator().manual_seed(self.index if index is None else index)
        return torch.randn(self.num_params, generator=generator).mul_(1e-3)


class Contestant(Protocol):
    """One implementation, on one island. Every island must call the same methods in the same
    order.
    """

    bootstrap: list[str]
    """Addresses that the other islands need to join the group."""
    address: str

    def connect(self, addresses: list[str]) -> None:
        """Connect to the other islands. `addresses` holds every island's address in order."""
        ...

    def prepare(self) -> None:
        """Prepare the next run. This is not measured."""
        ...

    def run(self, timeout_seconds: float) -> None:
        """Run the reduce or the synchronisation. This is measured."""
        ...

    def digest(self) -> str:
        """Return the digest of the result if all islands must have equal bits, else "".

        Raises WrongResult.
        """
        ...

    def sent_bytes(self) -> int | None:
        """Return the bytes sent so far by the contestant's own count; None if it has no counter."""
        ...

    def close(self) -> None: ...


class FakeModel:
    """Local params that fake inner steps move by `spec.values()`, and the global params to expect.

    All islands begin at zero, and each synchronisation is followed by the same inner steps. The
    expected outer step is Nesterov SGD with OUTER, computed here on the first elements in plain
    torch.
    """

    def __init__(self, spec: IslandSpec, tensors: list[torch.Tensor]) -> None:
        """`tensors` are the contestant's local params, in any shapes."""
        self.tensors = tensors
        self._progress = spec.values().split([values.numel() for values in tensors])
        self._mean = (
            sum(spec.values(index)[:CHECKED] for index in range(spec.num_islands))
            / spec.num_islands
        )
        self._expected = torch.nn.Parameter(torch.zeros_like(self._mean))
        self._optimizer = torch.optim.SGD([self._expected], **OUTER)
        self._tolerance = TOLERANCES[spec.codec]

    @torch.no_grad()
    def train(self) -> None:
        """Make the inner steps."""
        for values, progress in zip(self.tensors, self._progress, strict=True):
            values += progress.view_as(values)
        self._expected.grad = -self._mean
        self._optimizer.step()

    @torch.no_grad()
    def digest(self) -> str:
        """Return the digest of the local params after a synchronisation.

        Raises WrongResult if they differ from the expected params.
        """
        found = torch.cat([values.flatten()[:CHECKED] for values in self.tensors])[:CHECKED]
        error = ((found - self._expected).norm() / self._expected.norm()).item()
        if not error <= self._tolerance:
            raise WrongResult(
                f"relative error {error:.1e} beside SGD on the mean, allowed: {self._tolerance:g}"
            )
        digest = hashlib.blake2b(digest_size=16)
        for values in self.tensors:
            digest.update(values.contiguous().numpy())
        return digest.hexdigest()


def build_shapes(num_params: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model's matrices, and of a vector with the remaining elements.

    Together they have `num_params` elements.
    """
    rows, vector = divmod(num_params, LAYER[1])
    num_layers, last = divmod(rows, LAYER[0])
    shapes = [*[LAYER] * num_layers, *[(last, LAYER[1])] * (last > 0)]
    layers = {f"layers.{number}.weight": shape for number, shape in enumerate(shapes)}
    return layers | ({"norm.weight": (vector,)} if vector else {})


def open_store(spec: IslandSpec) -> tuple[dist.TCPStore, list[str]]:
    """Open the store in which a group of torch.distributed meets, and return it with its address.

    Island 0 serves the store.
    """
    if spec.bootstrap:
        host, _, port = spec.bootstrap[0].rpartition(":")
        return dist.TCPStore(host, int(port), is_master=False), spec.bootstrap
    store = dist.TCPStore(spec.host, 0, is_master=True, wait_for_workers=False)
    return store, [f"{spec.host}:{store.port}"]
