"""`diloco key` prints the public half of an island's key."""

from pathlib import Path

from typer.testing import CliRunner

from diloco.cli.main import app
from outer.identity.island_key import KEY_FILE, load_island_key


def test_the_key_of_an_island_is_made_once_and_printed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: two\n")
    command = ["key", str(tmp_path / "run.yaml"), f"island.run_dir={tmp_path}", "island.index=1"]
    first, again = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == 0 and first.stdout == again.stdout
    assert first.stdout.strip() == load_island_key(tmp_path / "two" / "island-1" / KEY_FILE).public
