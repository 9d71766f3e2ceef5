"""Islands in float16 with other overflows commit equal digests, and continue from the smallest loss
scale.
"""

from pathlib import Path

import pytest

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.train import train
from tests.faults.waits import assert_one_history
from tests.swarm import swarm

FIRST_EXPONENTS = 10, 30
"""The first overflows never, the second at once."""
FLOAT16 = (
    "outer.rounds=4",
    "island.compute_dtype=float16",
    "outer.wait_for=all",
    "island.checkpoint.every_rounds=1",
)


def train_and_return_exponent(config: Config, index: int) -> int:
    """Train an island, with a loss scale of its own at first unless it resumes; its last
    exponent.
    """
    exponents: list[int] = []

    def live(parts: Runtime) -> None:
        scale = parts.trainer.loss_scale
        assert scale is not None
        scale.exponent = FIRST_EXPONENTS[index]
        life.run(parts)
        assert parts.trainer.loss_scale is not None
        exponents.append(parts.trainer.loss_scale.exponent)

    train(config, index, live)
    return exponents[0]


def go_on_and_return_scale(config: Config, index: int) -> tuple[int, int]:
    """Resume an island whose run is over; its exponent and number of good steps."""
    found: list[tuple[int, int]] = []

    def live(parts: Runtime) -> None:
        life.run(parts)
        assert parts.trainer.loss_scale is not None
        found.append((parts.trainer.loss_scale.exponent, parts.trainer.loss_scale.num_good))

    train(config, index, live)
    return found[0]


@pytest.mark.slow
def test_islands_with_other_overflows_commit_equal_digests_and_continue_from_the_smallest_scale(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, *FLOAT16, islands=[{}, {}]) as made:
        islands = made.start_all(train_and_return_exponent)
        for island in islands:
            island.finish()
        assert_one_history(*islands)
        assert [island.result() for island in islands] == [FIRST_EXPONENTS[0]] * 2
        overflows = [[step["overflow"] for step in island.records("step")] for island in islands]
        assert not any(overflows[0])
        assert overflows[1] == [True, True, *[False] * 6]
        assert len(islands[1].events("gradient overflow")) == 2
    # A checkpoint has the scale and the good steps.
    with swarm(tmp_path, *FLOAT16, islands=[{}, {}]) as made:
        islands = made.start_all(go_on_and_return_scale)
        for island in islands:
            island.finish()
        assert [island.result() for island in islands] == [
            (FIRST_EXPONENTS[0], 8),
            (FIRST_EXPONENTS[0], 6),
        ]
