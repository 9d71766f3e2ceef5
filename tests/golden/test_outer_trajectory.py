"""The outer trajectory of three islands with fixed fake gradients, one of which dies in round 3, as
recorded.

A change of its numbers must be meant. Record it anew, in a commit of its own that says why, with

    REWRITE_GOLDEN=1 .venv/bin/pytest tests/golden/test_outer_trajectory.py

All numbers are multiples of powers of two that fp32 holds exactly, so that no machine may differ.
"""

import json
import os
from pathlib import Path

import torch

from outer.config import OuterConfig, OuterOptimizerConfig
from tests.outer.islands import GUARD_SECONDS, Held, Island, dies_in, run_islands

torch.set_num_threads(1)

GOLDEN = Path(__file__).with_name("outer_trajectory.json")
NUM_ROUNDS = 6
LOST_ROUND = 3
TOKENS = {"a": 1, "b": 1, "c": 2}
CONFIG = OuterConfig(
    transport="loopback",
    optimizer=OuterOptimizerConfig(lr=0.5, momentum=0.5),
    start_islands=3,
    wait_seconds=GUARD_SECONDS,
)
SHAPES = {"embed": (3, 5), "scale": (4,), "gain": (), "head": (2, 3, 2)}


def count(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def model() -> dict[str, torch.Tensor]:
    return {
        name: (count(shape) * 3 + k) % 7 / 4 - 1 for k, (name, shape) in enumerate(SHAPES.items())
    }


def fake_progress(island: str, round_number: int, held: Held, like: torch.Tensor) -> torch.Tensor:
    """What the inner steps of a round add: eighths between -5/8 and 5/8."""
    phase = 3 * ord(island) + 5 * round_number + len(held.name)
    return ((count(tuple(like.shape)) * 7 + phase) % 11 - 5) / 8


def script(island: Island) -> list[dict]:
    """One record a round; the island that is lost has none of its last."""
    island.outer.begin()
    records = []
    for number in range(NUM_ROUNDS):
        for held, values in zip(island.params.slices, island.params.values, strict=True):
            values.add_(fake_progress(island.name, number, held, values))
        if (island.name, number) == ("c", LOST_ROUND):
            assert not island.attempt(TOKENS["c"]).is_committed
            break
        report = island.commit(TOKENS[island.name])
        params = {
            h.name: v.flatten().tolist()
            for h, v in zip(island.params.slices, island.params.values, strict=True)
        }
        records.append(
            {
                "round": report.round,
                "attempt": report.attempt,
                "participants": report.participants,
                "digest": report.digest,
                "params": {
                    name: [value.hex() for value in values] for name, values in params.items()
                },
            }
        )
    return records


def test_the_outer_trajectory_is_as_recorded() -> None:
    found = run_islands(
        dict.fromkeys("abc", script), CONFIG, model=model, faults={"c": dies_in(LOST_ROUND)}
    )
    assert found["a"] == found["b"] and found["c"] == found["a"][:LOST_ROUND]
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found["a"], indent=1) + "\n")
    assert found["a"] == json.loads(GOLDEN.read_text())


def test_the_recorded_rounds_include_one_that_was_aborted_and_went_on_with_two() -> None:
    records = json.loads(GOLDEN.read_text())
    assert [r["attempt"] for r in records] == [0, 0, 0, 1, 0, 0]
    assert [len(r["participants"]) for r in records] == [3, 3, 3, 2, 2, 2]


def test_the_recorded_numbers_are_those_of_exact_arithmetic() -> None:
    params = {name: values.double() for name, values in model().items()}
    momentum = {name: torch.zeros_like(values) for name, values in params.items()}
    for number, record in enumerate(json.loads(GOLDEN.read_text())):
        names = record["participants"]
        for name, values in params.items():
            held = Held(name, (0, 0), (0, 0))
            grads = [-fake_progress(i, number, held, values).double() * TOKENS[i] for i in names]
            mean = sum(grads) / sum(TOKENS[i] for i in names)
            momentum[name].mul_(0.5).add_(mean)
            values.sub_(0.5 * (mean + 0.5 * momentum[name]))
            assert [
                float.fromhex(text) for text in record["params"][name]
            ] == values.flatten().tolist(), (number, name)
