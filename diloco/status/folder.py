"""The state of the islands with records in a run's folder: islands of this machine, running or not."""

import time
from pathlib import Path

from diloco.formatting import human_seconds
from diloco.records.figures import IslandFigures
from diloco.records.kept_config import read_plan
from diloco.records.run_folder import find_island_folders, read_island
from diloco.status.run_status import RunStatus, SeenIsland


def read_folder(run_dir: Path) -> RunStatus:
    """Read each island's state from its records. Raises InputError if the folder holds no run."""
    islands = [see_island(read_island(folder).latest.figures) for folder in find_island_folders(run_dir)]
    plan = read_plan(run_dir)
    config_hash = plan.config.hash if plan.config else ""
    return RunStatus(plan.name, str(run_dir), config_hash, islands, plan.num_steps, plan.num_rounds)


def see_island(figures: IslandFigures) -> SeenIsland:
    """Return the state of an island with these figures. Records do not show whether its processes live."""
    silent = human_seconds(max(time.time() - (figures.last_record or 0.0), 0.0))
    state = f"{figures.end} {silent} ago" if figures.end else f"last record {silent} ago"
    return SeenIsland(name=figures.name, state=state, figures=figures, round=figures.round, digest=figures.digest)
