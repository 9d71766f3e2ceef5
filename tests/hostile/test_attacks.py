"""Real islands commit on, and hold one state, while somebody attacks them; and all take part when
it is over.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.waits import last_round
from tests.hostile.attacks import ATTACKS, CASES
from tests.hostile.scene import HONEST, Attack, MiB, Scene, scene
from tests.hostile.turncoats import withholds

SECONDS, SHORT_SECONDS, WITHHELD_SECONDS = 8.0, 2.0, 90.0
LEAST_ROUNDS = 2
MOST_GROWTH = 160 * MiB
SHORT = {("garbage", "gloo"), ("goodbyes for others", "gloo"), ("payloads of NaN", "gloo")}
"""Cases that are part of the default run."""

Opener = Callable[[str], Scene]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Function from a network to a run over it, which the tests share until an attack breaks it."""
    with ExitStack() as stack:
        running: dict[str, Scene] = {}

        def get(network: str) -> Scene:
            if network not in running or not running[network].is_well:
                folder: Path = tmp_path_factory.mktemp(network)
                running[network] = stack.enter_context(scene(folder, network))
            return running[network]

        yield get


def marked(attack: Attack, network: str):
    marks = [] if (attack.name, network) in SHORT else [pytest.mark.slow]
    return pytest.param(
        attack, network, marks=marks, id=f"{attack.name}-{network}".replace(" ", "-")
    )


@pytest.mark.parametrize(("attack", "network"), [marked(*case) for case in CASES])
def test_the_honest_commit_on_and_agree_whatever_an_attacker_does(
    stage: Opener, attack: Attack, network: str
):
    run = stage(network)
    outcome = run.play(
        attack, SHORT_SECONDS if (attack.name, network) in SHORT else SECONDS, LEAST_ROUNDS
    )
    print(outcome)
    run.assert_well()
    assert outcome.grown < MOST_GROWTH


@pytest.mark.slow
@pytest.mark.parametrize("network", ["tls", "hivemind"])
def test_who_is_sent_nothing_by_one_island_is_not_put_out_for_good(tmp_path: Path, network: str):
    with scene(tmp_path / "withheld", network) as run:
        victim = next(island for island in run.islands if island.folder.name == HONEST[-1])
        (attack,) = (attack for attack in ATTACKS if attack.work is withholds)
        first = max(map(last_round, run.islands))
        outcome = run.play(attack, WITHHELD_SECONDS, LEAST_ROUNDS)
        last = first + outcome.rounds_during
        took_part = [number for number in victim.committed() if first < number <= last]
        print(outcome, sorted(took_part), first, last)
        run.assert_well()
        assert any(number > (first + last) / 2 for number in took_part)
