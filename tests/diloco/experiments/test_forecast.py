"""How long a run will take."""

from diloco.experiments.definition.build import build_rows
from diloco.experiments.definition.schema import load_experiment
from diloco.experiments.forecast import Cost, calibrated_seconds
from tests.diloco.experiments.tiny import write_tiny


def test_global_params_that_all_islands_hold_are_evaluated_once(tmp_path):
    axes = [[{"islands": 4}, {"islands": 4, "outer.gossip": {}, "outer.optimizer": {}}]]
    agreed, gossip = build_rows(
        load_experiment(write_tiny(tmp_path, axes=axes, baseline=None))
    ).rows
    step, evaluation = (
        Cost(step=1.0, evaluation=0.0, start=0.0),
        Cost(step=0.0, evaluation=1.0, start=0.0),
    )
    assert [calibrated_seconds(row, step) for row in (agreed, gossip)] == [4 * 24, 4 * 24]
    assert [calibrated_seconds(row, evaluation) for row in (agreed, gossip)] == [4, 4 * 4]
