"""Each fault at each phase of a round, over all transports: survivors stay equal, the victim
returns, nobody hangs.

The default suite runs one, of a fragment; all: scripts/test tests/faults -m "slow or not slow"
"""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from outer.hooks import PHASES
from tests.faults.cases import ROUND, SHARD2, STREAMING, run_with_fault
from tests.integration.relay_process import relay_process

ROUND_PHASES = [phase for phase in PHASES if phase not in ("donate", "fetch")]
MATRIX = list(product(("gloo", "tls", "hivemind"), ("kill", "freeze"), ROUND_PHASES, (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("transport,fault,phase,victim", MATRIX)
def test_one_history_survives_and_the_victim_comes_back(
    transport: str, fault: str, phase: str, victim: int, tmp_path: Path, place: Callable[[str], str]
):
    run_with_fault(
        tmp_path,
        f"{fault}:{victim}@round={ROUND},phase={phase}",
        victim,
        transport,
        place(transport),
    )


@pytest.fixture(scope="module")
def relay() -> Iterator[str]:
    """Address of a relay."""
    with relay_process() as (address, _):
        yield address


STREAMED = [
    pytest.param(*case, marks=[] if case == ("gloo", "kill", "decide") else [pytest.mark.slow])
    for case in product(
        ("gloo", "tls", "hivemind"),
        ("kill", "freeze"),
        ("planning", "sending", "reducing", "decide", "applied"),
    )
]


@pytest.mark.parametrize("transport,fault,phase", STREAMED)
def test_a_fragment_on_its_way_is_as_safe_as_a_whole_round(
    transport: str, fault: str, phase: str, tmp_path: Path, place: Callable[[str], str]
):
    run_with_fault(
        tmp_path,
        f"{fault}:1@round={ROUND},phase={phase}",
        1,
        transport,
        place(transport),
        *STREAMING,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport,fault,phase", product(("gloo", "tls", "hivemind"), ("kill", "freeze"), ROUND_PHASES)
)
def test_an_island_of_two_nodes_whose_first_is_hit_comes_back(
    transport: str, fault: str, phase: str, tmp_path: Path, place: Callable[[str], str]
):
    spec = f"{fault}:1@round={ROUND},phase={phase}"
    run_with_fault(tmp_path, spec, 1, transport, place(transport), own=SHARD2)


@pytest.mark.slow
@pytest.mark.parametrize("fault,phase", product(("kill", "freeze"), ROUND_PHASES))
def test_an_island_that_is_reached_by_a_relay_only_comes_back(
    fault: str, phase: str, tmp_path: Path, relay: str
):
    spec = f"{fault}:1@round={ROUND},phase={phase}"
    run_with_fault(tmp_path, spec, 1, "tls", "", own={"relays": [relay]})
