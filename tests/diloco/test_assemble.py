import os

import pytest

from diloco.assemble import hold_folder
from diloco.errors import ConfigError


def test_two_processes_cannot_be_the_same_island(tmp_path):
    held = hold_folder(tmp_path / "island-0")
    with pytest.raises(ConfigError, match="a running island uses the folder"):
        hold_folder(tmp_path / "island-0")
    os.close(held)
    os.close(hold_folder(tmp_path / "island-0"))
