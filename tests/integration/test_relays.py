"""Real islands, real relays: an island that nobody can reach trains with the others.

The default suite kills a relay; all: scripts/test tests/integration/test_relays.py -m "slow or not
slow"
"""

import signal
from pathlib import Path

import pytest

from tests.faults.bootstraps import bootstrap
from tests.integration.relay_process import relay_process
from tests.outer.routes.test_proxy import end_and_read, proxy
from tests.swarm import Island, swarm


def check_one_history(islands: list[Island], rounds: int) -> None:
    """Every round was committed, and no two islands committed different ones: one may have missed
    some.
    """
    found: dict[int, set[str]] = {}
    for island in islands:
        for number, record in island.committed().items():
            found.setdefault(number, set()).add(record["digest"])
    assert sorted(found) == list(range(rounds)) and all(
        len(digests) == 1 for digests in found.values()
    )


def check_equal_digests(islands: list[Island], rounds: int) -> None:
    """All islands have committed so many rounds, with the same digests."""
    found = [
        {number: record["digest"] for number, record in island.committed().items()}
        for island in islands
    ]
    assert all(sorted(digests) == list(range(rounds)) and digests == found[0] for digests in found)


def test_islands_that_only_dial_out_one_by_a_proxy_commit_rounds_with_equal_digests(tmp_path: Path):
    with relay_process() as (relay, _), proxy() as (port, proxied):
        own = {"relays": [relay]}
        by_proxy = own | {"proxy": f"http://127.0.0.1:{port}"}
        with swarm(tmp_path, "outer.transport=tls", islands=[{}, own, by_proxy]) as place:
            islands = place.start_all()
            for island in islands:
                island.finish()
            check_equal_digests(islands, 3)
        assert {relay, place.address.removeprefix("tcp://")} < end_and_read(proxied)


def test_a_relay_that_is_killed_in_mid_run_aborts_no_round_if_there_is_another(tmp_path: Path):
    with relay_process() as (first, process), relay_process() as (second, _):
        own = {"relays": [first, second]}
        with swarm(
            tmp_path,
            "outer.transport=tls",
            "outer.rounds=8",
            "model.dim=64",
            islands=[{}, own, own],
        ) as place:
            islands = place.start_all()
            islands[0].wait_for_round(2)
            process.kill()
            for island in islands:
                island.finish()
            check_equal_digests(islands, 8)
            assert [
                r for island in islands for r in island.records("round") if not r["committed"]
            ] == []


@pytest.mark.slow
def test_a_relay_that_freezes_in_mid_run_is_passed_over_and_used_when_it_wakes(tmp_path: Path):
    with relay_process() as (first, process), relay_process() as (second, _):
        own = {"relays": [first, second]}
        with swarm(
            tmp_path, "outer.transport=tls", "outer.rounds=16", islands=[{}, own, own]
        ) as place:
            islands = place.start_all()
            islands[0].wait_for_round(2)
            process.send_signal(signal.SIGSTOP)
            islands[0].wait_for_round(8)
            process.send_signal(signal.SIGCONT)
            for island in islands:
                island.finish()
            check_one_history(islands, 16)


@pytest.mark.slow
def test_islands_behind_a_relay_that_is_slow_wait_for_it_and_stay_equal(tmp_path: Path):
    with relay_process("--mbit", "1") as (relay, _):
        own = {"relays": [relay]}
        with swarm(tmp_path, "outer.transport=tls", islands=[{}, own, own]) as place:
            islands = place.start_all()
            for island in islands:
                island.finish()
            check_equal_digests(islands, 3)


@pytest.mark.slow
def test_islands_over_tls_that_meet_in_a_dht_go_on_when_its_first_peer_has_died(tmp_path: Path):
    with bootstrap("hivemind", tmp_path / "bootstrap") as peer, relay_process() as (relay, _):
        settings = ["outer.transport=tls", "outer.rounds=8", "model.dim=64"]
        with swarm(
            tmp_path, *settings, islands=[{}, {}, {"relays": [relay]}], address=peer.address
        ) as place:
            islands = place.start_all()
            islands[0].wait_for_round(2)
            peer.kill()
            for island in islands:
                island.finish()
            check_equal_digests(islands, 8)
