"""A folder of runs that cannot be made is one line, whoever starts the island."""

from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

import diloco
from diloco.cli.main import app
from diloco.config.new_config import write_config
from diloco.errors import ConfigError

ALONE = "outer: {transport: loopback, rounds: 1, inner_steps: 1, start_islands: 1}\n"


@pytest.fixture(params=["file", "file/below", "/proc/none"])
def no_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path at which no folder can be made."""
    (tmp_path / "file").touch()
    return tmp_path / request.param


def test_a_loop_of_ones_own_is_refused(no_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(ALONE)
    with pytest.raises(
        ConfigError,
        match=f"island.run_dir: the folder {no_folder} cannot be used: .*; name a folder",
    ):
        diloco.Islands(
            tmp_path / "run.yaml", nn.Linear(2, 2), overrides=[f"island.run_dir={no_folder}"]
        )


def test_launch_ends_with_one_line_and_a_status_that_is_final(
    no_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(ALONE)
    result = CliRunner().invoke(
        app, ["launch", str(tmp_path / "run.yaml"), f"island.run_dir={no_folder}"]
    )
    assert result.exit_code == 78
    assert result.output.startswith(f"error: island.run_dir: the folder {no_folder} cannot be used")
    assert result.output.count("\n") == 1


def test_a_first_config_that_cannot_be_written_is_refused(no_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"one\.yaml cannot be written: .*; go to a folder where this user may"
    ):
        write_config("one", no_folder)
