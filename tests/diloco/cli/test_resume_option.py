"""`--resume` has the last word on whether an island goes on from its checkpoint."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.arguments import with_resume
from diloco.cli.main import app
from diloco.config.schema import load_config

TEXT = "island: {checkpoint: {resume: never}}\nislands: [{}, {checkpoint: {resume: never}}]\n"


@pytest.mark.parametrize(
    "option, expected", [("auto", "auto"), ("never", "never"), (None, "never")]
)
def test_it_wins_over_the_file(tmp_path: Path, option: str | None, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    config = load_config(path, with_resume(None, option))
    assert {config.for_island(index).checkpoint.resume for index in (0, 1)} == {expected}


def test_it_wins_over_another_value_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("")
    config = load_config(path, with_resume(["island.checkpoint.resume=auto"], "never"))
    assert config.island.checkpoint.resume == "never"


@pytest.mark.parametrize("command", ["train", "join"])
def test_other_words_are_refused_with_those_allowed(command: str) -> None:
    said = CliRunner().invoke(app, [command, "anything", "--resume", "maybe"])
    assert said.exit_code == 2
    assert all(word in said.output for word in ("maybe", "auto", "never"))
