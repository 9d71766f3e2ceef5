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
