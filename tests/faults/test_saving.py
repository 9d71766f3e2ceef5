"""Failures of checkpoints with the real commands: a run continues unchanged, or reports the
cause.
"""

import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from diloco.errors import FINAL_STATUS
from tests.damage import flip, truncate
from tests.faults.dying import MIRROR, POINTS, die_at
from tests.faults.saving import (
    DILOCO,
    LAUNCHER,
    ROUNDS,
    SLOW,
    TORCHRUN,
    SavingRun,
    digests,
    events,
    fill,
    list_published,
    mount_tmpfs,
    remount,
    wait_for_end,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEEP_ONE = "island.checkpoint.keep=1"
TWO_RANKS = ["island.ranks=2", KEEP_ONE]
Digests = dict[int, set[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SavingRun:
    return SavingRun(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def whole(place: SavingRun) -> Digests:
    """Digests of a run without failures."""
    place.run(place.folder / "whole").well()
    found = digests(place.folder / "whole" / "test" / "island-0")
    assert sorted(found) == list(range(ROUNDS)) and all(len(one) == 1 for one in found.values())
    return found


@pytest.fixture(scope="module")
def stopped(place: SavingRun) -> Path:
    """The folder of a run that was stopped after three rounds, with its three checkpoints."""
    run = place.folder / "stopped" / "test"
    run.mkdir(parents=True)
    (run / "island-0").mkdir()
    (run / "island-0" / "stop-after-round").write_text("3")
    place.run(run.parent, "island.checkpoint.keep=3").well()
    assert list_published(run / "island-0" / "checkpoints") == [
        "step-00000004",
        "step-00000006",
        "step-00000006-2",
    ]
    return run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint but not for two."""
    with mount_tmpfs(tmp_path / "disk", "size=2400k") as folder:
        yield folder


# Killed while it saves.


@pytest.mark.parametrize("point", POINTS)
def test_killed_while_it_saves_it_ends_as_if_nothing_had_been(
    place: SavingRun, whole: Digests, tmp_path: Path, point: str
) -> None:
    settings = [KEEP_ONE, f"island.checkpoint.mirror={tmp_path / MIRROR}"]
    died = place.run(tmp_path, *settings, before=partial(die_at, point))
    assert died.status == -signal.SIGKILL, died.text[-3000:]
    island = tmp_path / "test" / "island-0"
    assert len(digests(island)) < ROUNDS and list_published(island / "checkpoints")
    place.run(tmp_path, *settings).well()
    assert events(island, "resumed") and digests(island) == whole


def test_killed_while_it_copies_it_goes_on_from_the_mirror_alone(
    place: SavingRun, whole: Digests, tmp_path: Path
) -> None:
    settings = [KEEP_ONE, f"island.checkpoint.mirror={tmp_path / MIRROR}"]
    point = "while it is copied to the mirror"
    assert place.run(tmp_path, *settings, before=partial(die_at, point)).status == -signal.SIGKILL
    island = tmp_path / "test" / "island-0"
    shutil.rmtree(island / "checkpoints")
    is_copied = list((tmp_path / MIRROR).glob("test/island-0/step-*/manifest.json"))
    place.run(tmp_path, *settings).well()
    assert bool(events(island, "resumed")) == bool(is_copied) and digests(island) == whole


@pytest.mark.parametrize(
    "point, rank, launcher",
    [
        ("before it is published", "0", LAUNCHER),
        ("before its own file", "1", LAUNCHER),
        ("before its own file", "1", TORCHRUN),
    ],
)
def test_ranks_are_started_again_of_which_one_died_saving(
    place: SavingRun, tmp_path: Path, point: str, rank: str, launcher: str
) -> None:
    train = place.arguments("train", tmp_path / "whole", *TWO_RANKS)
    place.end([*launcher.split(), "diloco", *train]).well()
    train = place.arguments("train", tmp_path, *TWO_RANKS)
    place.end([*launcher.split(), "tests.faults.dying", point, rank, *train]).well()
    island = tmp_path / "test" / "island-0"
    assert events(island, "resumed")
    assert digests(island) == digests(tmp_path / "whole" / "test" / "island-0")


# Damaged files.


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    place: SavingRun, whole: Digests, stopped: Path, tmp_path: Path, damage
) -> None:
    run = shutil.copytree(stopped, tmp_path / "test")
    damaged = [
        run / "island-0" / "checkpoints" / name / "rank-0.tensors"
        for name in ("step-00000006-2", "step-00000006")
    ]
    for file in damaged:
        damage(file)
    said = place.run(tmp_path).well().text
    assert all(f"checkpoint passed over: {file}: damaged" in said for file in damaged)
    assert events(run / "island-0", "resumed")[0].startswith("inner step 4, round 2")
    assert digests(run / "island-0") == whole


def test_when_all_are_damaged_it_says_so_and_begins_anew_when_told_to(
    place: SavingRun, whole: Digests, stopped: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(stopped, tmp_path / "test")
    for file in (run / "island-0" / "checkpoints").glob("*/index.json"):
        flip(file)
    refused = place.run(tmp_path)
    assert refused.status == FINAL_STATUS and "Traceback" not in refused.text
    assert (
        "none of the 3 checkpoints is whole" in refused.text
        and "index.json: damaged" in refused.text
    )
    place.run(tmp_path, "--resume", "never").well()
    assert not events(run / "island-0", "resumed")
    assert digests(run / "island-0") == whole


# Disks.


def test_a_full_disk_for_checkpoints_is_said_and_the_old_one_stays(
    place: SavingRun, whole: Digests, tmp_path: Path, disk: Path
) -> None:
    place.run(tmp_path, f"island.checkpoint.folder={disk}").well()
    island, folder = tmp_path / "test" / "island-0", disk / "test" / "island-0"
    problems = events(island, "not saved")
    assert len(problems) == ROUNDS - 1
    assert all(
        "the disk is full" in text and text.endswith("; training goes on") for text in problems
    )
    assert digests(island) == whole and list_published(folder) == ["step-00000002"]
    remount(disk, "size=8m")
    place.run(tmp_path, f"island.checkpoint.folder={disk}").well()
    assert events(island, "resumed")[0].startswith("inner step 2, round 1")
    assert digests(island) == whole


def test_a_run_whose_whole_disk_is_full_trains_to_its_end(
    place: SavingRun, whole: Digests, tmp_path: Path, disk: Path
) -> None:
    remount(disk, "size=8m")
    log, island = tmp_path / "said.txt", disk / "test" / "island-0"
    process = place.start(log, place.arguments(f"{DILOCO} simulate", disk, SLOW))
    wait_until(lambda: list_published(island / "checkpoints"), process)
    filler = fill(disk)
    said = wait_for_end(process).well().text
    assert "no report: " in said and "No space left on device" in said
    assert len(digests(island)) < ROUNDS and list_published(island / "checkpoints")
    filler.unlink()
    place.run(disk).well()
    assert events(island, "resumed") and digests(island) == whole


def test_checkpoints_that_can_no_longer_be_written_are_said_and_the_old_ones_stay(
    place: SavingRun, whole: Digests, tmp_path: Path
) -> None:
    log, island = tmp_path / "said.txt", tmp_path / "test" / "island-0"
    process = place.start(log, place.arguments("train", tmp_path, SLOW))
    wait_until(lambda: list_published(island / "checkpoints"), process)
    with mount_tmpfs(island / "checkpoints", "ro"):
        wait_for_end(process).well()
    assert any("Read-only file system" in text for text in events(island, "not saved"))
    assert digests(island) == whole and list_published(island / "checkpoints")
    place.run(tmp_path).well()
    assert events(island, "resumed") and digests(island) == whole


@pytest.mark.parametrize("what", ["run_dir", "checkpoint.folder"])
def test_a_read_only_folder_is_refused_at_the_start(
    place: SavingRun, tmp_path: Path, disk: Path, what: str
) -> None:
    remount(disk, "ro")
    refused = place.run(tmp_path, f"island.{what}={disk}")
    assert refused.status in (1, FINAL_STATUS) and "Traceback" not in refused.text
    assert f"{disk}" in refused.text and "Read-only file system" in refused.text


# Two islands, one folder.


def test_two_islands_of_a_config_with_one_name_are_refused_before_any_starts(
    place: SavingRun, tmp_path: Path
) -> None:
    islands = "islands=[{name: a}, {name: a}]"
    refused = place.end(place.arguments("simulate", tmp_path, islands, "outer.transport=gloo"))
    assert (
        refused.status == FINAL_STATUS
        and "islands[1].name: 'a' is the name of islands[0], too" in refused.text
    )
    assert not (tmp_path / "test").exists()


@pytest.mark.parametrize("shared", ["the run's folder", "the checkpoints' folder"])
def test_a_second_command_in_the_same_folder_is_refused_and_the_first_goes_on(
    place: SavingRun, whole: Digests, tmp_path: Path, shared: str
) -> None:
    log, island = tmp_path / "said.txt", tmp_path / "test" / "island-0"
    folder = f"island.checkpoint.folder={tmp_path / 'checkpoints'}"
    process = place.start(log, place.arguments("train", tmp_path, SLOW, folder))
    wait_until(lambda: list_published(tmp_path / "checkpoints" / "test" / "island-0"), process)
    process.signal(signal.SIGSTOP)
    refused = place.run(tmp_path if shared == "the run's folder" else tmp_path / "other", folder)
    process.signal(signal.SIGCONT)
    is_run = shared == "the run's folder"
    expected = (
        "a running island uses the folder" if is_run else "another process saves checkpoints here"
    )
    assert (
        refused.status == FINAL_STATUS
        and expected in refused.text
        and "Traceback" not in refused.text
    )
    wait_for_end(process).well()
    assert digests(island) == whole
    assert "failed" not in (tmp_path / "test" / "LOGBOOK.md").read_text()
