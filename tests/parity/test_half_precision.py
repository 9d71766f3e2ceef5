"""In bfloat16 and float16 a mesh and one process round differently, and stay within a band; masters
are fp32.
"""

from typing import get_args

import pytest

from inner.config.parallel import Schedule
from tests.parity.meshes import MIXTURE, PREDICT, PREDICT_MIXTURE, TIED, Case, case, of

SCHEDULES = get_args(Schedule)
CASES = [
    case("dp_shard2", compute_dtype="bfloat16"),
    case("tp2", micro_batch=6, compute_dtype="bfloat16"),
    *(
        pytest.param(slow, marks=pytest.mark.slow)
        for slow in (
            case("tp2", TIED, micro_batch=6, compute_dtype="bfloat16"),
            case("cp2", compute_dtype="bfloat16"),
            case("pp2", TIED, schedule="zbv", compute_dtype="bfloat16"),
            case("pp2 dp_shard2 cp2 tp2", TIED, compute_dtype="bfloat16"),
            case("pp2 dp_shard2", PREDICT, schedule="zbv", micro_batch=1, compute_dtype="bfloat16"),
            case("dp_shard2", compute_dtype="float16"),
            case("dp_replicate2 cp2", compute_dtype="float16"),
            case("pp2 dp_shard2 cp2 tp2", TIED, compute_dtype="float16"),
            case("tp2", MIXTURE, micro_batch=6, compute_dtype="float16"),
            case("dp_shard2 ep2", PREDICT_MIXTURE, compute_dtype="float16"),
            *(
                case("pp2", micro_batch=2, schedule=schedule, compute_dtype="float16")
                for schedule in SCHEDULES
            ),
        )
    ),
]
on_every_mesh = pytest.mark.parametrize("case", CASES, ids=str)


@on_every_mesh
def test_gradients_stay_within_the_band(case: Case) -> None:
    expected = of(case.reference)[0].gradients
    for name, values in of(case)[0].gradients.items():
        assert float((values - expected[name]).norm() / expected[name].norm()) < 0.03, name


@on_every_mesh
def test_losses_stay_within_the_band(case: Case) -> None:
    losses = [step.loss for step in of(case)[0].steps]
    assert losses == pytest.approx([step.loss for step in of(case.reference)[0].steps], rel=1e-3)


@on_every_mesh
def test_initial_weights_and_masters_are_those_of_float32(case: Case) -> None:
    for name, values in of(case.reference)[0].theta0.items():
        assert of(case)[0].theta0[name].equal(values), name
