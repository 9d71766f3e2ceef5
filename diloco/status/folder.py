"""The state of the islands with records in a run's folder: islands of this machine, running or not."""

import time
from pathlib import Path

from diloco.config.schema import RunConfig, load_config
from diloco.errors import ConfigError
from diloco.formatting import human_seconds
from diloco.records.latest import LatestRecords
from diloco.records.run_folder import METRICS, Tail, find_island_folders
from diloco.status.reply import describe_records
from diloco.status.run_status import RunStatus, SeenIsland


def read_folder(run_dir: Path) -> RunStatus:
    """Read each island's state from its records. Raises InputError if the folder holds no run."""
    islands = [read_island_state(folder) for folder in find_island_folders(run_dir)]
    run = read_run_config(run_dir)
    if run is None:
        return RunStatus(run_dir.resolve().name, str(run_dir), "", islands, 0, 0)
    return RunStatus(run.name, str(run_dir), run.hash, islands, run.total_steps, run.outer.num_rounds)


def read_island_state(folder: Path) -> SeenIsland:
    """Read the state of the island with this folder.

    Records do not show whether its processes live.
    """
    latest = LatestRecords(folder.name)
    now = time.time()
    for record in Tail(folder / METRICS).new_records():
        latest.write(record)
    silent = human_seconds(max(now - latest.time, 0.0))
    state = f"{latest.end} {silent} ago" if latest.end else f"last record {silent} ago"
    committed = max(latest.committed) + 1 if latest.committed else 0
    training = describe_records(latest, now)
    return SeenIsland(name=folder.name, state=state, training=training, round=committed, digest=latest.digest)


def read_run_config(run_dir: Path) -> RunConfig | None:
    """Read the run's part of the config in its folder; return None if it is missing or unreadable."""
    try:
        return load_config(run_dir / "config.yaml").run
    except ConfigError:
        return None
