"""fp32 masters of parameters that are trained in bfloat16 or float16: the loop's own, or kept by
Islands.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import ConfigError
from inner.optim.moments import ParamsAndMoments
from inner.params import LocalParams

HALF = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that may have masters."""


@dataclass(frozen=True)
class Masters:
    """fp32 masters that the loop's optimizer steps, for `Islands(..., params=Masters(...))`."""

    by_name: Mapping[str, Tensor]
    """The masters, by the names of the model's parameters. Each has the parameter's whole shape."""
    copy: Callable[[], None]
    """Copies all masters into the model. It is called after each change of the masters by
    Islands.
    """

    def check(self, trained: Mapping[str, Sequence[Tensor]]) -> None:
        """Raise ConfigError unless each master is one of a parameter of this rank that is
        trained.
        """
        for name, master in self.by_name.items():
            problem = ""
            if name not in trained:
                problem = "is of no parameter that requires a gradient on this rank"
            elif master.is_meta or master.dtype != torch.float32:
                problem = (
                    f"is {str(master.dtype).removeprefix('torch.')} on {master.device}, "
                    "expected float32 values"
                )
            elif master.shape != trained[name][0].shape:
                problem = (
                    f"has the shape {tuple(master.shape)}, the parameter "
                    f"{tuple(trained[name][0].shape)}"
                )
            if problem:
                raise ConfigError(
                    f"params: the master {name!r} {problem}; give a master for each such parameter"
                )


class CopiedBack:
    """Params that are the loop's masters. The model gets a copy of them after each change."""

    def __init__(self, params: LocalParams | ParamsAndMoments, copy: Callable[[], None]) -> None:
        self._params = params
        self._copy = copy
        self.specs = params.specs
        self.slices = params.slices

    def read_all(self, indices: Iterable[int]) -> dict[int, Tensor]:
        return self._params.read_all(indices)

    def write_all(self, values: Mapping[int, Tensor]) -> None:
        """Write slices by index. It is called after slices have been written in place, too."""
        self._params.write_all(values)
        self._copy()

    def pinned(self, index: int) -> Tensor | None:
        return self._params.pinned(index)

    def live(self, index: int) -> Tensor | None:
        return self._params.live(index)


class KeptMasters:
    """Params whose masters Islands keeps, while the loop's optimizer steps the model's own.

    The model's value is what the loop has trained. A master is this value and what rounding has cut
    off of the last global value, as long as the sum still rounds to the model's value.
    """

    def __init__(self, params: LocalParams, models: Sequence[Sequence[Tensor]]) -> None:
        """Keep the masters in `params`. `models`: for each of its slices the model's parameters,
        one for each copy of the master; empty if the slice is of the model itself.
        """
        self._params = params
        self._models = models
        self.specs = params.specs
        self.slices = params.slices

    def read_all(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Return slices by index, with the progress of the model's values."""
        indices = list(indices)
        for index in indices:
            for master, model in self._pairs(index):
                follow(master, model)
        return self._params.read_all(indices)

    def write_all(self, values: Mapping[int, Tensor]) -> None:
        """Write slices by index into the masters, and rounded into the model."""
        self._params.write_all(values)
        for index in values:
            for master, model in self._pairs(index):
                model.copy_(master)

    def pinned(self, index: int) -> Tensor | None:
        return self._params.pinned(index)

    def live(self, index: int) -> Tensor | None:
        """Return the slice to be written in place; None if the model needs a rounded copy."""
        return None if self._models[index] else self._params.live(index)

    def _pairs(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each copy of a slice its views in the master and in the model's parameter."""
        models = self._models[index]
        masters = self._params.copies(index)[: len(models)]
        views = self._params.local_view
        return [
            (views(index, master), views(index, model))
            for master, model in zip(masters, models, strict=True)
        ]


def follow(master: Tensor, model: Tensor) -> None:
    """Let a master follow the model's value, in place. It does nothing if the model is the rounded
    master.
    """
    trained = model.float()
    cut_off = master - master.to(model.dtype).float()
    exact = trained + cut_off
    master.copy_(torch.where(exact.to(model.dtype) == model, exact, trained))
