"""Copies of checkpoints at a URL: whole or not there, as many as wanted, found again on another
disk.
"""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from diloco.checkpoints.mirror import Mirror
from inner.checkpoint import folder as disk
from inner.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileSpec,
    Manifest,
    Unsigned,
    write_manifest,
)
from inner.errors import InputError
from tests.diloco.checkpoints.s3_server import s3_server
from tests.inner.former_checkpoint import specs_of

_numbers = itertools.count()
ROOT = Path(__file__).parents[3]
AT_S3 = os.environ.get("MIRROR_AT_S3")
"""A bucket where these tests are made, in a process of its own: s3fs starts a thread that stays,
and others fork.
"""


@pytest.fixture(params=["memory", "folder"] if AT_S3 is None else ["s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if AT_S3 is not None:
        return f"{AT_S3}/run-{next(_numbers)}"
    return (
        f"memory://mirror-{next(_numbers)}/run"
        if request.param == "memory"
        else str(tmp_path / "other disk")
    )


@pytest.mark.skipif(AT_S3 is not None, reason="this is the process that the test has started")
def test_all_of_this_holds_at_s3() -> None:
    with s3_server() as bucket:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", __file__]
        env = os.environ | {"MIRROR_AT_S3": bucket}
        done = subprocess.run(
            command, env=env, cwd=ROOT, timeout=200, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("PASSED") > 12 and done.stdout.count("[s3]") >= 8, done.stdout[-4000:]


def saved(folder: Path, *steps: int) -> None:
    """Checkpoints of these steps, each with a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        partial = disk.create_partial(folder, step, 10, 1)
        (partial / "rank-0.tensors").write_text(f"state of step {step}")
        disk.publish(partial, Manifest(step, {}, {}, specs_of(partial)))


def test_the_newest_checkpoint_is_found_on_another_disk_byte_for_byte(
    tmp_path: Path, url: str
) -> None:
    saved(tmp_path / "one", 10, 20)
    Mirror(url, keep=2).push(tmp_path / "one")
    assert Mirror(url, keep=2).pull(tmp_path / "two") == "step-00000020"
    (found,), problems = disk.list_published(tmp_path / "two")
    assert (found.inner_step, problems) == (20, [])
    assert disk.find_damage(found, found.manifest.files) is None


def test_only_as_many_as_wanted_are_kept_there(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url, keep=2)
    for step in (10, 20, 30):
        saved(tmp_path / "one", step)
        mirror.push(tmp_path / "one")
    saved(tmp_path / "two", 20)
    assert [copy.name for copy in Mirror(url, keep=2)._list()[0]] == [
        "step-00000020",
        "step-00000030",
    ]


def test_an_island_with_a_newer_one_of_its_own_takes_none(tmp_path: Path, url: str) -> None:
    saved(tmp_path / "one", 10)
    Mirror(url, keep=2).push(tmp_path / "one")
    saved(tmp_path / "two", 20)
    assert Mirror(url, keep=2).pull(tmp_path / "two") is None


def test_what_was_copied_by_halves_is_not_taken(tmp_path: Path, url: str) -> None:
    saved(tmp_path / "one", 10)
    mirror = Mirror(url, keep=2)
    mirror.push(tmp_path / "one")
    saved(tmp_path / "one", 20)
    mirror.push(tmp_path / "one")
    files, root = fsspec.url_to_fs(url)
    files.rm_file(f"{root}/step-00000020/{MANIFEST}")
    assert Mirror(url, keep=2).pull(tmp_path / "two") == "step-00000010"


def test_a_url_of_no_known_kind_is_named() -> None:
    with pytest.raises(InputError, match="mirror: got 'nothing://here'"):
        Mirror("nothing://here", keep=1)


def test_half_a_manifest_makes_no_copy_whole(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url, keep=2)
    for step in (10, 20):
        saved(tmp_path / "one", step)
        mirror.push(tmp_path / "one")
    files, root = fsspec.url_to_fs(url)
    manifest = f"{root}/step-00000020/{MANIFEST}"
    files.pipe_file(manifest, files.cat_file(manifest)[:100])
    assert Mirror(url, keep=2).pull(tmp_path / "two") == "step-00000010"


def test_the_copy_takes_the_place_of_a_damaged_one(tmp_path: Path, url: str) -> None:
    saved(tmp_path / "one", 10, 20)
    Mirror(url, keep=2).push(tmp_path / "one")
    (tmp_path / "one" / "step-00000020" / "rank-0.tensors").write_text("state")
    assert Mirror(url, keep=2).pull(tmp_path / "one") == "step-00000020"
    assert disk.list_published(tmp_path / "one")[0][0].inner_step == 20


def test_a_run_that_went_back_is_found_where_it_is_now(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url, keep=1)
    for step in (10, 20):
        saved(tmp_path / "one", step)
        mirror.push(tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "step-00000010")
    saved(tmp_path / "one", 10)
    mirror.push(tmp_path / "one")
    assert Mirror(url, keep=1).pull(tmp_path / "two") == "step-00000010"
    assert disk.list_published(tmp_path / "two")[0][0].manifest.serial == 3
    assert Mirror(url, keep=1).pull(tmp_path / "one") is None


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[str, fsspec.AbstractFileSystem, str]:
    """A mirror with one checkpoint, as its URL, its file system and the path of the checkpoint
    there.
    """
    url = f"memory://mirror-{next(_numbers)}/run"
    saved(tmp_path / "one", 10)
    Mirror(url, keep=1).push(tmp_path / "one")
    files, root = fsspec.url_to_fs(url)
    return url, files, f"{root}/step-00000010"


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_name_at_the_mirror_that_leads_elsewhere_is_not_followed(tmp_path: Path, hostile) -> None:
    url, files, copy = hostile
    # A store of objects, such as S3, takes any text as a name.
    name = f"{copy}/../../../evil"
    files.store[name] = MemoryFile(files, name, b"evil")
    target = tmp_path / "a" / "b"
    target.mkdir(parents=True)
    assert Mirror(url, keep=1).pull(target) == "step-00000010"
    assert not {name for name in everything(tmp_path) if "evil" in name}


@pytest.mark.parametrize(
    "name",
    ["../../evil", "/tmp/evil", "a/rank-0.tensors", "lock", "manifest.json", "rank-0.tensors/.."],
)
def test_a_manifest_that_names_a_file_elsewhere_is_refused(
    tmp_path: Path, hostile, name: str
) -> None:
    url, files, copy = hostile
    raw = write_manifest(
        Manifest(10, {}, {}, {name: FileSpec(16, blake3="0" * 64)}, serial=9), Unsigned()
    )
    files.pipe_file(f"{copy}/{MANIFEST}", raw)
    with pytest.raises(InputError, match=r"refused: .* is not the name of a file of a checkpoint"):
        Mirror(url, keep=1).pull(tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("content", [b"state of step 11", b"state of step 10 and more"])
def test_a_copy_with_other_bytes_gets_no_name(tmp_path: Path, hostile, content: bytes) -> None:
    url, files, copy = hostile
    files.pipe_file(f"{copy}/rank-0.tensors", content)
    with pytest.raises(InputError, match="damaged"):
        Mirror(url, keep=1).pull(tmp_path / "two")
    assert everything(tmp_path / "two") == set()


def test_a_manifest_without_end_is_not_fetched(tmp_path: Path, hostile) -> None:
    url, files, copy = hostile
    files.pipe_file(f"{copy}/{MANIFEST}", bytes(MAX_MANIFEST_BYTES + 10))
    with pytest.raises(InputError, match="a manifest is shorter"):
        Mirror(url, keep=1).pull(tmp_path / "two")


def test_an_older_copy_is_taken_when_the_newest_is_damaged(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url, keep=2)
    for step in (10, 20):
        saved(tmp_path / "one", step)
        mirror.push(tmp_path / "one")
    files, root = fsspec.url_to_fs(url)
    files.pipe_file(f"{root}/step-00000020/rank-0.tensors", b"state of step 21")
    assert Mirror(url, keep=2).pull(tmp_path / "two") == "step-00000010"
