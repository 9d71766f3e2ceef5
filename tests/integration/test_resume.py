"""An island that was killed continues from its checkpoint bit for bit as if it had never
stopped.
"""

import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco import island as life
from diloco.assemble import Runtime
from diloco.checkpoints.global_params import read_global_params
from diloco.config.schema import Config
from diloco.train import train
from inner.checkpoint.folder import list_published
from tests.diloco.checkpoints.s3_server import s3_server
from tests.faults.waits import last_round, until
from tests.swarm import GUARD_SECONDS, Island, Work, kill_in_step, swarm, train_and_return_params

EACH_ROUND = ["island.checkpoint.every_rounds=1", "outer.rounds=6", "outer.inner_steps=4"]
LAST, END = 5, 14
STREAMED = ["outer.fragments=2", "outer.delay=1", "outer.mix=0.5"]
GOSSIP = ["outer.gossip.group=2"]
LOSSY = ["outer.codec=stat2", "outer.coding.feedback=0.9"]


def killed_after(steps: int) -> Work:
    """Train until the process kills itself in inner step `steps`, before the step is recorded or
    sent.
    """

    def work(config: Config, index: int) -> None:
        def live(parts: Runtime) -> None:
            kill_in_step(
                steps,
                parts,
                lambda: come_together(Path(parts.island.run_dir), index, len(config.islands)),
            )
            life.run(parts)

        train(config, index, live)

    return work


def come_together(folder: Path, index: int, count: int) -> None:
    """Wait until all islands are here. If one died earlier, the others would finish the last round
    without it.
    """
    (folder / f"here-{index}").touch()
    deadline = time.monotonic() + GUARD_SECONDS
    while len(list(folder.glob("here-*"))) < count:
        assert time.monotonic() < deadline, "an island did not come to its last step"
        time.sleep(0.01)


def losses(island: Island) -> dict[int, float]:
    """Last recorded loss of each inner step."""
    return {record["step"]: record["loss"] for record in island.records("step")}


def trained(
    folder: Path, *settings: str, ranks: int = 1, start: Callable[[Any], list[Island]]
) -> list[Island]:
    islands = [{"ranks": ranks}, {}]
    with swarm(folder, *EACH_ROUND, *settings, islands=islands) as made:
        found = start(made)
        for island in found:
            island.finish()
        return found


def stopped_and_resumed(steps: int) -> Callable[[Any], list[Island]]:
    def start(made: Any) -> list[Island]:
        for island in made.start_all(killed_after(steps)):
            assert -signal.SIGKILL in island.wait()
        return made.start_all()

    return start


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="plain", marks=pytest.mark.slow),
        pytest.param([*STREAMED, *LOSSY], id="streamed, feedback"),
        pytest.param(
            ["outer.merge.max_norm_zscore=3"], id="histories of norms", marks=pytest.mark.slow
        ),
        pytest.param(GOSSIP, id="gossip", marks=pytest.mark.slow),
    ],
)
def test_two_islands_killed_in_a_round_end_as_if_nothing_had_been(
    tmp_path: Path, settings: list[str]
) -> None:
    # On a busy machine an island may be late for a round. Both are needed, so that the other waits
    # for it.
    both = [] if settings == GOSSIP else ["outer.quorum=2"]
    whole = trained(tmp_path / "whole", *settings, *both, start=lambda made: made.start_all())
    broken = trained(tmp_path / "broken", *settings, *both, start=stopped_and_resumed(14))
    for one, other in zip(whole, broken, strict=True):
        assert other.events("resumed")
        assert losses(one) == losses(other)
    last = max(whole[0].committed())
    assert {i.committed()[last]["digest"] for i in [*whole, *broken]} == {
        whole[0].committed()[last]["digest"]
    }


def digests(island: Island, event: str) -> list[str]:
    """Digests of the global params in the island's events of this kind."""
    return [text.rpartition(" ")[2] for text in island.events(event)]


def test_global_params_are_read_from_any_mesh_by_one_process(tmp_path: Path) -> None:
    with swarm(tmp_path, *EACH_ROUND, "outer.rounds=2", islands=[{"ranks": 2}, {}]) as made:
        islands = made.start_all(train_and_return_params)
        for island in islands:
            island.finish()
        trained = islands[1].result()
    for name in ("island-0", "island-1"):
        run, params = read_global_params(tmp_path / "test", name)
        assert params.keys() == trained.keys()
        assert all(torch.equal(params[key].flatten(), trained[key].flatten()) for key in params)
        assert run.outer.rounds == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after",
    [((1, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 1), (1, 1, 2, 1)), ((1, 2, 1), (1, 1))],
)
def test_islands_go_on_with_other_meshes_and_numbers(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    with swarm(tmp_path, *EACH_ROUND, islands=[{"ranks": n} for n in before]) as made:
        for island in made.start_all():
            island.finish()
        saved = {
            record["digest"][:12]
            for record in (island.committed()[LAST] for island in made.started)
        }
    settings = [*EACH_ROUND, f"outer.rounds={END}", f"outer.quorum={len(after)}"]
    with swarm(tmp_path, *settings, islands=[{"ranks": n} for n in after]) as made:
        for island in made.start_all():
            island.finish()
        for island in made.started[: len(before)]:
            assert island.events("resumed")
            assert {digests(island, "joined")[-1]} == saved, "the digest after is the digest before"
        last = [island.committed()[END - 1] for island in made.started]
        assert len({record["digest"] for record in last}) == 1
        assert len(last[0]["participants"]) == len(after)


@pytest.mark.slow
def test_the_checkpoint_of_one_island_is_enough(tmp_path: Path) -> None:
    with swarm(tmp_path, *EACH_ROUND, islands=[{}, {}]) as made:
        for island in made.start_all():
            island.finish()
    shutil.rmtree(
        tmp_path / "test" / "island-1" / "checkpoints"
    )  # Not its key, to which its name belongs.
    with swarm(
        tmp_path, *EACH_ROUND, f"outer.rounds={END}", "outer.quorum=2", islands=[{}, {}]
    ) as made:
        for island in made.start_all():
            island.finish()
        first, second = made.started
        assert first.events("resumed") and not second.events("resumed")
        assert not second.events("joined")[-1].startswith("round 0"), (
            "it has taken the other's state"
        )
        assert first.committed()[END - 1]["digest"] == second.committed()[END - 1]["digest"]


@pytest.mark.slow
def test_an_island_alone_goes_on_with_a_second_one_and_a_quorum_of_two(tmp_path: Path) -> None:
    with swarm(tmp_path, *EACH_ROUND, islands=[{}]) as made:
        made.start(0).finish()
    with swarm(
        tmp_path, *EACH_ROUND, f"outer.rounds={END}", "outer.quorum=2", islands=[{}, {}]
    ) as made:
        for island in made.start_all():
            island.finish()
        first, second = made.started
        assert first.committed()[END - 1]["digest"] == second.committed()[END - 1]["digest"]


@pytest.mark.slow
def test_killed_in_any_step_it_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    with swarm(tmp_path / "whole", *EACH_ROUND, islands=[{}]) as made:
        made.start(0).finish()
        whole = losses(made.started[0])
    for steps in range(1, 21):
        with swarm(tmp_path / str(steps), *EACH_ROUND, islands=[{}]) as made:
            assert made.start(0, killed_after(steps)).wait() == [-signal.SIGKILL]
            again = made.start(0)
            again.finish()
            assert losses(again) == whole, f"killed in step {steps}"


@pytest.fixture(params=["folder", "s3"])
def other_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "other disk")
        return
    with s3_server() as url:
        yield url


def test_an_island_whose_disk_is_lost_goes_on_from_the_copy(
    tmp_path: Path, other_disk: str
) -> None:
    settings = [*EACH_ROUND, f"island.checkpoint.mirror={other_disk}"]
    with swarm(tmp_path, *settings, islands=[{}]) as made:
        made.start(0).finish()
        digest = made.started[0].committed()[LAST]["digest"]
    shutil.rmtree(tmp_path / "test")
    with swarm(tmp_path, *settings, "outer.rounds=7", islands=[{}]) as made:
        island = made.start(0)
        island.finish()
        assert island.events("resumed") and digests(island, "joined") == [digest[:12]]


def num_published(folder: Path) -> int:
    """Number of whole checkpoints in a folder that may not exist yet."""
    return len(list_published(folder)[0]) if folder.exists() else 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="plain"),
        pytest.param(STREAMED, id="streamed", marks=pytest.mark.slow),
        pytest.param(["outer.wait_for=quorum"], id="quorum", marks=pytest.mark.slow),
    ],
)
def test_all_islands_killed_after_the_first_commit_do_not_begin_anew(
    tmp_path: Path, settings: list[str]
) -> None:
    settings = ["outer.rounds=100000", "island.checkpoint.every_rounds=1000", *settings]
    with swarm(tmp_path, *settings, islands=[{}, {}]) as made:
        for island in made.start_all():
            until(
                lambda saved=island.folder / "checkpoints": num_published(saved),
                "a checkpoint",
                island,
            )
        made.end()
        before = {island.folder: last_round(island) for island in made.started}
        for island in made.start_all():
            until(
                lambda again=island: last_round(again) > before[again.folder], "it goes on", island
            )
            assert int(island.events("resumed")[0].rpartition("round ")[2]) >= 1


def test_the_early_checkpoint_leaves_the_later_ones_where_they_were(tmp_path: Path) -> None:
    settings = ["outer.rounds=5", "outer.inner_steps=2", "island.checkpoint.every_rounds=2"]
    with swarm(tmp_path, *settings, "island.checkpoint.keep=10", islands=[{}]) as made:
        island = made.start(0)
        island.finish()
        saved = [found.inner_step for found in list_published(island.folder / "checkpoints")[0]]
        assert sorted(saved) == [2, 4, 8, 10], (
            "after the first commit, every second round and at the end"
        )


def test_save_now_saves_in_the_middle_of_a_round(tmp_path: Path) -> None:
    settings = [
        "outer.rounds=100000",
        "outer.inner_steps=1000",
        "island.checkpoint.every_rounds=1000",
    ]
    with swarm(tmp_path, *settings, islands=[{}]) as made:
        island = made.start(0)
        until(lambda: len(island.records("step")) > 3, "it trains", island)
        (island.folder / "save-now").touch()
        checkpoints = island.folder / "checkpoints"
        # A manifest alone may still lie in step-N.partial, which is renamed last.
        until(lambda: list_published(checkpoints)[0], "it has saved", island)
        island.signal(signal.SIGKILL)
        assert island.wait() == [-signal.SIGKILL]
        again = made.start(0)
        until(lambda: again.events("joined")[1:], "it goes on", again)
        step = int(again.events("resumed")[0].split()[2].rstrip(","))
        assert 0 < step < 1000
        until(lambda: max(losses(again)) > step, "it trains on", again)


def test_a_run_that_goes_on_with_other_settings_says_so_at_once(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> None:
        logging.basicConfig(force=True)
        train(config, index)

    settings = ["island.checkpoint.every_rounds=1", "outer.rounds=1"]
    with swarm(tmp_path, *settings, islands=[{}]) as made:
        made.start(0, work).finish()
        assert "other settings" not in made.started[0].log
    with swarm(tmp_path, *settings, "outer.rounds=2", "outer.inner_steps=3", islands=[{}]) as made:
        again = made.start(0, work)
        again.finish()
        assert (
            "the run goes on with other settings than it was saved with; changed since: "
            in again.log
        )
        assert "outer.inner_steps: here 3" in again.log
