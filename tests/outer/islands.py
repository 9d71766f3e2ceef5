"""Support for tests of the outer loop: params without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Spec:
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A rectangle of it that a rank holds."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]


class FakeParams:
    """What `inner.params.LocalParams` offers, of plain matrices: this rank's copy of each slice in `slices`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], slices: Sequence[Held] | None = None) -> None:
        self.specs = [Spec(name, tuple(values.shape)) for name, values in tensors.items()]
        matrices = {name: as_matrix(values) for name, values in tensors.items()}
        whole = [Held(name, (0, m.shape[0]), (0, m.shape[1])) for name, m in matrices.items()]
        self.slices = whole if slices is None else list(slices)
        self.values = [matrices[s.name][slice(*s.rows), slice(*s.cols)].clone() for s in self.slices]

    def read(self, index: int) -> torch.Tensor:
        return self.values[index]

    def write(self, index: int, values: torch.Tensor) -> None:
        assert values.shape == self.values[index].shape
        self.values[index].copy_(values)

    def flat(self) -> torch.Tensor:
        """All that this rank holds, one after the other."""
        return torch.cat([values.flatten() for values in self.values])


def as_matrix(values: torch.Tensor) -> torch.Tensor:
    """(shape[0], rest), as the canonical space sees a parameter."""
    shape = tuple(values.shape)
    return values.reshape(prod(shape[:1]), prod(shape[1:]))
