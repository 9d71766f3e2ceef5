"""Islands that made a round together learn the smallest of their loss scales; the states stay
equal.
"""

import pytest

from outer.report import RoundReport
from outer.rounds.agreed import AgreedAverager
from tests.outer.islands import Island, run_islands
from tests.outer.test_going_back import config


def train_with(exponent: int | None, island: Island) -> RoundReport:
    """One round of an island with this loss scale."""
    averager = island.outer.averager
    assert isinstance(averager, AgreedAverager) and averager.runner.leader is not None
    averager.runner.leader.loss_scale = lambda: exponent
    island.outer.begin()
    return island.round()


@pytest.mark.parametrize(
    ("exponents", "expected"),
    [((16, 12, 14), 12), ((None, 12, 14), 12), ((None, 0, None), 0), ((None,) * 3, None)],
)
def test_every_report_has_the_smallest_scale_of_the_participants(
    exponents: tuple[int | None, ...], expected: int | None
) -> None:
    scripts = {
        f"island-{index}": lambda island, exponent=exponent: train_with(exponent, island)
        for index, exponent in enumerate(exponents)
    }
    reports = list(run_islands(scripts, config(len(exponents))).values())
    assert [report.loss_scale for report in reports] == [expected] * 3
    assert len({report.digest for report in reports}) == 1
