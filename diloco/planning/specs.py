"""A model's parameters by name and shape, without building it. No torch here."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from inner.measure.units import block_unit, table_unit
from inner.presets import ModelSizes


class Spec(NamedTuple):
    """A parameter's full name and global shape."""

    name: str
    shape: tuple[int, ...]


def specs_of(sizes: ModelSizes) -> tuple[Spec, ...]:
    """The model's parameters in its own order, as far as cutting it into fragments and parts needs them."""
    table = table_unit(sizes, tp=1).shapes[0]
    specs = [Spec("embed.weight", table)]
    for layer in range(sizes.num_layers):
        for number, (rows, cols) in enumerate(block_unit(sizes, tp=1).shapes):
            specs.append(Spec(f"layers.{layer}.w{number}", (rows,) if cols == 1 else (rows, cols)))
    specs.append(Spec("norm.weight", (sizes.dim,)))
    return tuple(specs if sizes.tie_embeddings else [*specs, Spec("head.weight", table)])


def num_elements(specs: Sequence[Spec]) -> int:
    """Parameters in all."""
    return sum(prod(spec.shape) for spec in specs)
