"""What islands around loops of one's own find out about each other when they enter the run."""

import logging
from pathlib import Path

from diloco.config.schema import Config
from diloco.own_loop.islands import Islands
from outer.errors import OuterError
from tests.diloco.own_loop.loops import own_config, small_model
from tests.swarm import swarm


def test_islands_that_begin_with_other_weights_both_name_both_digests_and_the_cures(
    tmp_path: Path,
) -> None:
    def work(config: Config, index: int) -> str:
        logging.basicConfig(force=True)
        own, digest = own_config(config, index, wait_seconds=4.0, inner_steps=1), ""
        try:
            with Islands(own, small_model(seed=index)) as islands:
                digest = islands.digest
                islands.step(tokens=1)
        except OuterError as error:
            return f"{digest} {error}"
        return digest

    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(work):
            island.finish()
        results, logs = (
            [island.result() for island in made.started],
            [island.log for island in made.started],
        )
    digests = [result.split()[0][:12] for result in results]
    for text in (*results, *logs):
        assert all(digest in text for digest in digests)
        assert all(
            cure in text for cure in ("the same seed", "the same weights", "island.joins=true")
        )
    assert not any("taking the state of other islands failed" in log for log in logs)
