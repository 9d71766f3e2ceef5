"""Six islands, of which the fastest coordinates: it, or another one, is killed or frozen at each
phase of a round.

The default suite runs one case; all: scripts/test tests/faults -m "slow or not slow"
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.faults.cases import run_with_fault
from tests.faults.test_matrix import ROUND_PHASES

NUM_ISLANDS = 6
VICTIM = 2
ROUND = 10
"""The round of the fault. By then the islands know their speeds, also on a busy machine."""
ROLES = {"coordinator": VICTIM, "another": 4}
"""The island that coordinates, by what the victim is."""
CASES = [
    pytest.param(
        *case,
        marks=[] if case == ("gloo", "kill", "planning", "coordinator") else [pytest.mark.slow],
    )
    for case in [
        *product(("gloo",), ("kill", "freeze"), ROUND_PHASES, ROLES),
        *product(("hivemind",), ("kill", "freeze"), ("planning", "reducing", "decide"), ROLES),
    ]
]


@pytest.mark.parametrize("transport,fault,phase,role", CASES)
def test_the_others_go_on_whoever_coordinates(
    transport: str, fault: str, phase: str, role: str, tmp_path: Path, place: Callable[[str], str]
):
    spec = f"{fault}:{VICTIM}@round={ROUND},phase={phase}"
    run_with_fault(
        tmp_path,
        spec,
        VICTIM,
        transport,
        place(transport),
        num_islands=NUM_ISLANDS,
        coordinator=ROLES[role],
    )
