"""Real islands, real relays: an island that nobody can reach trains with the others."""

from pathlib import Path

from tests.integration.relay_process import relay_process
from tests.outer.routes.test_proxy import end_and_read, proxy
from tests.swarm import Island, swarm


def check_equal_digests(islands: list[Island], rounds: int) -> None:
    """All islands have committed so many rounds, with the same digests."""
    found = [{number: record["digest"] for number, record in island.committed().items()} for island in islands]
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
        with swarm(tmp_path, "outer.transport=tls", "outer.rounds=8", "model.dim=64", islands=[{}, own, own]) as place:
            islands = place.start_all()
            islands[0].wait_for_round(2)
            process.kill()
            for island in islands:
                island.finish()
            check_equal_digests(islands, 8)
            assert [r for island in islands for r in island.records("round") if not r["committed"]] == []
