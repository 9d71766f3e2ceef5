"""The gradient noise scale in a run's summary."""

from dataclasses import replace

import pytest

from diloco.records.run_folder import IslandRecords
from diloco.report.summary import noise_figures
from tests.diloco.sample_records import a_step


def island(name: str, measured: list[tuple[float, float]]) -> IslandRecords:
    """Records of an island of 512 tokens per step, each second step of which is measured: (signal,
    noise).
    """
    steps = []
    for number, (signal, noise) in enumerate(measured):
        steps += [
            a_step(2 * number + 1),
            replace(a_step(2 * number + 2), noise_scale={"signal": signal, "noise": noise}),
        ]
    return IslandRecords(name, steps)


def test_the_scale_is_the_ratio_of_the_means_of_the_later_half_of_all_islands():
    islands = [island("a", [(9.0, 9.0), (2.0, 100.0)]), island("b", [(9.0, 9.0), (-1.0, 300.0)])]
    assert noise_figures(islands) == {
        "noise_scale": pytest.approx(200 / 0.5),
        "step_tokens": 1024.0,
    }


def test_without_a_measurement_or_with_a_negative_mean_there_is_no_scale():
    assert noise_figures([IslandRecords("a", [a_step()])])["noise_scale"] is None
    assert noise_figures([island("a", [(-1.0, 3.0)])])["noise_scale"] is None
