"""A rank of an island or the bootstrap process dies and is restarted while the run goes on."""

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.config.schema import dump_config
from diloco.runtime.processes import find_processes, island_command, kill, start
from outer.identity.island_key import KEY_FILE, load_island_key
from tests.faults.bootstraps import Bootstrap, bootstrap
from tests.faults.waits import assert_one_history, more_rounds, reached, until
from tests.swarm import Island, Swarm, swarm

BOTH = ["island-0", "island-1"]


def rank_of(pid: int) -> int | None:
    """The rank of the process, or None if it is none."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [
        int(value.removeprefix(b"RANK=")) for value in environment if value.startswith(b"RANK=")
    ]
    return ranks[0] if ranks else None


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_an_island_is_started_again_whose_rank_died_and_it_is_the_same_island(
    tmp_path, place, transport
):
    settings = [
        "outer.rounds=100000",
        "outer.inner_steps=4",
        f"outer.transport={transport}",
        f"name={tmp_path.name}",
    ]
    islands = [{"faults": ["slow:0x5"]}, {"ranks": 2, "faults": ["slow:1x5"]}]
    with swarm(tmp_path, *settings, islands=islands, address=place(transport)) as made:
        (tmp_path / "run.yaml").write_text(dump_config(made.config))
        command = island_command(
            2, ["train", str(tmp_path / "run.yaml"), "island.index=1"], max_restarts=1
        )
        log = tmp_path / "launched.txt"
        child = start("island-1", command, log)
        try:
            first = made.start(0)
            victim = Island(tmp_path / tmp_path.name / "island-1", [])
            reached(first, 3)
            reached(victim, 3)
            identity = load_island_key(victim.folder / KEY_FILE).public
            (rank,) = (pid for pid in find_processes([child]) if rank_of(pid) == 1)
            os.kill(rank, signal.SIGKILL)
            more_rounds(first, 3, ["island-0"])
            until(lambda: len(victim.events("joined")) >= 2, "its second life begins", first)
            more_rounds(first, 3, BOTH)
            assert load_island_key(victim.folder / KEY_FILE).public == identity
            assert child.exit_code is None, child.log_tail()
            assert "already" not in log.read_text(), "its own name was not refused to it"
            assert_one_history(first, victim)
        finally:
            kill([child])


def outlives(made: Swarm, served: Bootstrap) -> None:
    """Start two islands and check that they commit after the bootstrap process has died."""
    for i in range(2):
        made.start(i)
    for island in made.started:
        reached(island, 2)
    served.kill()
    for island in made.started:
        more_rounds(island, 5, BOTH)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_a_run_outlives_its_bootstrap_and_an_island_joins_after_its_restart(tmp_path, transport):
    if transport == "hivemind":
        import hivemind  # noqa: F401 - the forked islands inherit it
    settings = [
        "outer.rounds=100000",
        "outer.inner_steps=4",
        f"outer.transport={transport}",
        "outer.start_islands=2",
    ]
    islands = [{"faults": [f"slow:{i}x5" for i in range(3)]}] * 3
    with ExitStack() as stack:
        served = stack.enter_context(bootstrap(transport, tmp_path))
        made = stack.enter_context(
            swarm(tmp_path, *settings, islands=islands, address=served.address)
        )
        outlives(made, served)
        served.restart()
        joiner = made.start(2)
        more_rounds(joiner, 3, [*BOTH, "island-2"])
        assert min(joiner.committed()) > 2, "it has taken the run's state"
        assert_one_history(*made.started)


@pytest.mark.slow
def test_an_island_joins_through_another_when_the_bootstrap_is_dead(tmp_path):
    from hivemind.p2p import PeerID

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = [
        "outer.rounds=100000",
        "outer.inner_steps=4",
        "outer.transport=hivemind",
        "outer.start_islands=2",
    ]
    slow = {"faults": [f"slow:{i}x5" for i in range(3)]}
    with ExitStack() as stack:
        served = stack.enter_context(bootstrap("hivemind", tmp_path))
        islands = [slow | {"listen_port": port}, slow, slow]
        made = stack.enter_context(
            swarm(tmp_path, *settings, islands=islands, address=served.address)
        )
        outlives(made, served)
        peer = PeerID.from_identity((made.started[0].folder / "identity.key").read_bytes())
        through = slow | {"bootstrap": [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"]}
        joiner = made.start(
            2, config=made.config.model_copy(update={"islands": (*islands[:2], through)})
        )
        more_rounds(joiner, 3, [*BOTH, "island-2"])
        assert min(joiner.committed()) > 2, "it has taken the run's state"
        assert_one_history(*made.started)
