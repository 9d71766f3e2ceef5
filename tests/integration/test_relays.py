"""Real islands, real relays: an island that nobody can reach trains with the others."""

from pathlib import Path

from tests.integration.relay_process import relay_process
from tests.swarm import Island, swarm


def check_equal_digests(islands: list[Island], rounds: int) -> None:
    """All islands have committed so many rounds, with the same digests."""
    found = [{number: record["digest"] for number, record in island.committed().items()} for island in islands]
    assert all(sorted(digests) == list(range(rounds)) and digests == found[0] for digests in found)


def test_islands_that_only_dial_out_commit_rounds_with_equal_digests(tmp_path: Path):
    with relay_process() as (relay, _):
        own = {"relays": [relay]}
        with swarm(tmp_path, "outer.transport=tls", islands=[{}, own, own]) as place:
            islands = place.start_all()
            for island in islands:
                island.finish()
            check_equal_digests(islands, 3)


def test_a_relay_that_is_killed_in_mid_run_aborts_no_round_if_there_is_another(tmp_path: Path):
    with relay_process() as (first, process), relay_process() as (second, _):
        own = {"relays": [first, second]}
        with swarm(tmp_path, "outer.transport=tls", "outer.rounds=8", "model.dim=64", islands=[{}, own, own]) as place:
            islands = place.start_all()
            islands[0].wait_for_round(2)
            process.kill()
            for island in islands:
                island.finish()
            check_equal_digests(islands, 8)
            assert [r for island in islands for r in island.records("round") if not r["committed"]] == []
