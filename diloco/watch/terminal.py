"""The run's state in the terminal, with the table of `diloco simulate`."""

import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from diloco.records.run_folder import find_island_folders, island_folders, read_facts
from diloco.simulate.dashboard import Dashboard

UPDATE_SECONDS = 1.0


def show_text(run_dir: Path) -> None:
    """Show the table of `diloco simulate`; on a terminal until Ctrl-C, elsewhere once."""
    names, facts, console = [each.name for each in find_island_folders(run_dir)], read_facts(run_dir), Console()
    with (
        Dashboard(run_dir, names, facts.total_steps if facts else 0, console) as dashboard,
        suppress(KeyboardInterrupt),
    ):
        while console.is_terminal:
            for folder in island_folders(run_dir):
                dashboard.add_island(folder.name)
            dashboard.update()
            time.sleep(UPDATE_SECONDS)
