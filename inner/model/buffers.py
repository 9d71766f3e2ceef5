"""Buffers of a model that training changes and islands share: biases of routers, running
statistics.

Each rank of a stage holds a buffer whole. To the outer loop a buffer is a tensor beside the
parameters, with the name `<buffer>@<kind>`:

    buffer          rounds average it, and it is part of the committed state
    donor_buffer    it is each island's own, and only a joiner takes a donor's
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from inner.param_spec import ParamSlice, ParamSpec
from inner.params import local_tensor, pinned_like, read_to_host

BufferKind = Literal["buffer", "donor_buffer"]


@dataclass(frozen=True)
class Buffer:
    """A buffer of a live module. It is looked up at each access, because code may put another
    tensor in its place.
    """

    name: str
    """Full name in the model."""
    module: nn.Module
    attribute: str
    kind: BufferKind = "buffer"

    @property
    def tensor(self) -> Tensor:
        """The live buffer, of which a DTensor is a copy on each rank."""
        return local_tensor(self.module.get_buffer(self.attribute))

    @property
    def spec(self) -> ParamSpec:
        return ParamSpec(f"{self.name}@{self.kind}", tuple(self.tensor.shape))


def saved_buffers(stages: Iterable[nn.Module]) -> Iterator[Buffer]:
    """Yield the stages' buffers that are part of the training state. A module names its own in
    `saved_buffers`.
    """
    for stage in stages:
        for path, module in stage.named_modules():
            for name in getattr(module, "saved_buffers", ()):
                yield Buffer(f"{path}.{name}" if path else name, module, name)


def all_buffers(model: nn.Module) -> list[Buffer]:
    """Return all buffers of a model, each under its first name."""
    paths = [name.rpartition(".") for name, _ in model.named_buffers()]
    return [Buffer(f"{path}{dot}{own}", model.get_submodule(path), own) for path, dot, own in paths]


class ParamsView(Protocol):
    """The interface of `inner.params.LocalParams` that the outer loop uses."""

    @property
    def specs(self) -> Sequence[ParamSpec]: ...
    @property
    def slices(self) -> Sequence[ParamSlice]: ...
    def read_all(self, indices: Iterable[int]) -> dict[int, Tensor]: ...
    def write_all(self, values: Mapping[int, Tensor]) -> None: ...
    def pinned(self, index: int) -> Tensor | None: ...
    def live(self, index: int) -> Tensor | None: ...


def with_buffers(
    params: ParamsView, specs: Collection[ParamSpec], buffers: Sequence[Buffer]
) -> ParamsView:
    """Return a view of the parameters and of these buffers; the parameters' own view if the model
    has no buffers. `specs` are those of the whole model, `buffers` those that this rank holds.
    """
    return ParamsAndBuffers(params, specs, buffers) if specs else params


class ParamsAndBuffers:
    """Reads and writes this rank's slices of parameters, then buffers, with the interface of
    LocalParams. Buffers of any real dtype are read as fp32.
    """

    def __init__(
        self, params: ParamsView, specs: Iterable[ParamSpec], buffers: Sequence[Buffer]
    ) -> None:
        self._params = params
        self._buffers = list(buffers)
        self._num_params = len(params.slices)
        """Number of slices of parameters and moments, after which those of buffers come."""
        self.specs = [*params.specs, *specs]
        self.slices = [*params.slices, *map(_whole, buffers)]

    def read_all(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Return slices by index, see `LocalParams.read_all`."""
        wanted = list(indices)
        of_params = [index for index in wanted if index < self._num_params]
        of_buffers = {index: self._matrix(index) for index in wanted if index >= self._num_params}
        return self._params.read_all(of_params) | read_to_host(of_buffers)

    def write_all(self, values: Mapping[int, Tensor]) -> None:
        """Write slices by index, see `LocalParams.write_all`."""
        self._params.write_all(
            {index: new for index, new in values.items() if index < self._num_params}
        )
        for index, new in values.items():
            if index >= self._num_params:
                self._write(index, new)

    def pinned(self, index: int) -> Tensor | None:
        """Return memory for new values of slice `index`, see `LocalParams.pinned`."""
        return (
            self._params.pinned(index)
            if index < self._num_params
            else pinned_like(self._matrix(index))
        )

    def live(self, index: int) -> Tensor | None:
        """Return slice `index` itself, or None if it cannot be written in place, as a buffer, which
        may have another dtype.
        """
        return self._params.live(index) if index < self._num_params else None

    def _matrix(self, index: int) -> Tensor:
        tensor = self._buffers[index - self._num_params].tensor
        return tensor.to(torch.float32).reshape(self.slices[index].shape)

    @torch.no_grad()
    def _write(self, index: int, values: Tensor) -> None:
        target = self._buffers[index - self._num_params].tensor
        target.copy_(values.view(target.shape), non_blocking=True)


def _whole(buffer: Buffer) -> ParamSlice:
    rows, cols = buffer.spec.matrix_shape
    return ParamSlice(buffer.spec.name, (0, rows), (0, cols))
