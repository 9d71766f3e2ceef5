"""Real islands commit on, and hold one state, while somebody attacks them; and all take part when it is over."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hostile.attacks import CASES
from tests.hostile.scene import Attack, MiB, Scene, scene

SECONDS, SHORT_SECONDS = 8.0, 2.0
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
    return pytest.param(attack, network, marks=marks, id=f"{attack.name}-{network}".replace(" ", "-"))


@pytest.mark.parametrize(("attack", "network"), [marked(*case) for case in CASES])
def test_the_honest_commit_on_and_agree_whatever_an_attacker_does(stage: Opener, attack: Attack, network: str):
    run = stage(network)
    outcome = run.play(attack, SHORT_SECONDS if (attack.name, network) in SHORT else SECONDS, LEAST_ROUNDS)
    print(outcome)
    run.assert_well()
    assert outcome.grown < MOST_GROWTH
