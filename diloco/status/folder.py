"""The state of the islands with records in a run's folder: islands of this machine, running or
not.
"""

import time
from pathlib import Path

from diloco.formatting import human_seconds
from diloco.overview.account import account_for
from diloco.overview.overview import find_overview
from diloco.records.figures import IslandFigures
from diloco.records.kept_config import read_plan
from diloco.records.run_folder import find_island_folders, read_island
from diloco.status.run_status import RunStatus, SeenIsland


def read_folder(run_dir: Path, since: float = 0.0) -> RunStatus:
    """Read each island's state from its records, and what happened since a unix time.

    Raises InputError if the folder holds no run.
    """
    records = [read_island(folder) for folder in find_island_folders(run_dir)]
    islands = [see_island(island.latest.figures) for island in records]
    plan = read_plan(run_dir)
    config_hash = plan.config.hash if plan.config else ""
    account = account_for((island.name, island.all) for island in records)
    overview = find_overview(account, plan, since)
    return RunStatus(
        plan.name, str(run_dir), config_hash, islands, plan.num_steps, plan.num_rounds, overview
    )


def see_island(figures: IslandFigures) -> SeenIsland:
    """Return the state of an island with these figures. Records do not show whether its processes
    live.
    """
    silent = human_seconds(max(time.time() - (figures.last_record or 0.0), 0.0))
    state = f"{figures.end} {silent} ago" if figures.end else f"last record {silent} ago"
    return SeenIsland(
        name=figures.name, state=state, figures=figures, round=figures.round, digest=figures.digest
    )
