"""`diloco prepare` with shards: into a store, into the cache, and its mistakes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from inner.data.streaming.index import INDEX, parse_index
from tests.inner.data.streaming.texts import write_rows


def prepare(tmp_path: Path, *arguments: str) -> str:
    folder = tmp_path / "text"
    if not folder.exists():
        write_rows(folder, 40)
    (tmp_path / "a.yaml").write_text(
        f"data: {{source: files, paths: [{folder}], heldout_fraction: 0.2, seq_len: 16, "
        f"shard_tokens: 512}}\n"
        f"island: {{cache_dir: {tmp_path / 'cache'}}}\n"
    )
    done = CliRunner().invoke(app, ["prepare", str(tmp_path / "a.yaml"), *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_a_store_is_written_checked_and_mended(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    assert "training tokens" in prepare(tmp_path, "--into", url)
    assert f"data.source=shards data.paths=[{url}]" in prepare(tmp_path, "--into", url)
    (tmp_path / "store/00002.bin").write_bytes(b"")
    assert "mended: 00002.bin" in prepare(tmp_path, "--into", url, "--repair")
    assert "mended: nothing" in prepare(tmp_path, "--into", url, "--repair")


def test_all_shards_are_made_before_the_run(tmp_path: Path) -> None:
    assert "shards," in prepare(tmp_path, "data.order=shards")
    (index,) = (tmp_path / "cache").glob(f"shards/*/{INDEX}")
    found = parse_index(index.read_bytes(), "")
    assert found.is_complete and len(list(index.parent.glob("[0-9]*.bin"))) == len(found.shards) > 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--repair"], "name it by --into"),
        (["data.seq_len=24", "--into", "/nowhere"], "not a multiple of data.seq_len 24"),
        (
            ["data.order=shards", "data.seq_len=24"],
            "shard_tokens: got 512, which is not a multiple of seq_len 24",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        prepare(tmp_path, *arguments)
