"""A checkpoint that others wrote may hold what no island saves: it is refused before anything goes
on from it.
"""

import math
from typing import Any

import pytest
import torch

from outer.config import CodingConfig, OuterConfig, OuterOptimizerConfig
from outer.errors import InputError
from tests.outer.islands import GUARD_SECONDS, Island, run_islands

Saved = tuple[dict[str, torch.Tensor], dict[str, Any]]
CONFIG = OuterConfig(
    start_islands=1,
    quorum=1,
    transport="loopback",
    wait_seconds=GUARD_SECONDS,
    codec="int8",
    coding=CodingConfig(feedback=1.0),
    optimizer=OuterOptimizerConfig(delayed=True),
)
PREFIXES = (
    "outer/params/",
    "outer/momentum/",
    "outer/residual/",
    "outer/mean_residual/",
    "outer/pushes/",
)


def save(island: Island) -> Saved:
    island.outer.begin()
    island.round()
    tensors, facts = island.outer.save()
    return {name: values.clone() for name, values in tensors.items()}, facts


def restore_each(saved: Saved, poisoned: list[tuple[str, float]]) -> list[str]:
    """What an island says to the saved tensors with this value in one of the name's, for each of
    the pairs.
    """

    def script(island: Island) -> list[str]:
        said = []
        for name, value in poisoned:
            room = island.outer.allocate(saved[0])
            for each, values in room.items():
                values.copy_(saved[0][each])
            room[name].view(-1)[0] = value
            with pytest.raises(InputError) as error:
                island.outer.restore(room, saved[1])
            said.append(str(error.value))
        island.outer.begin()
        return said

    return run_islands({"a": script}, CONFIG)["a"]


def test_tensors_that_are_not_finite_and_impossible_pushes_are_refused_by_name() -> None:
    saved = run_islands({"a": save}, CONFIG)["a"]
    names = [next(name for name in saved[0] if name.startswith(prefix)) for prefix in PREFIXES]
    found = restore_each(
        saved, [(name, value) for name in names for value in (math.nan, math.inf, -math.inf)]
    )
    assert all("holds inf or nan" in text for text in found)
    assert [name for name in names if not any(name in text for text in found)] == []
    impossible = restore_each(saved, [(names[-1], value) for value in (-1.0, 0.5, 1e9)])
    assert all("number of pushes" in text for text in impossible)
