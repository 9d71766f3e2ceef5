"""What `diloco launch` refuses before it starts a rank: an island that would wait for others for
ever.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import FINAL_STATUS

TEXT = "outer: {transport: tls, start_islands: 2}\nislands: [{}, {}]\n"


@pytest.mark.parametrize(
    "word, text",
    [
        ("island.index=1", "island.bootstrap: got no address, and 1 more begin with it"),
        ("island.index=2", "island.index: got 2, and `islands` has the entries 0 to 1"),
    ],
)
def test_an_island_that_cannot_meet_the_others_is_not_started(
    tmp_path: Path, word: str, text: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    result = CliRunner().invoke(
        app, ["launch", str(path), word, f"island.run_dir={tmp_path / 'runs'}"]
    )
    assert result.exit_code == FINAL_STATUS
    assert f"error: {text}" in result.output
    assert not (tmp_path / "runs").exists()
