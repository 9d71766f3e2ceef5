"""config.yaml in a run's folder: its resolved config, for `diloco status`, `watch` and `report`.

A file that cannot be written costs a warning.
"""

from pathlib import Path

from diloco.config.overrides import differing_keys
from diloco.config.schema import Config, RunConfig, dump_config, load_config
from diloco.errors import ConfigError
from diloco.records.best_effort import best_effort
from diloco.records.run_folder import CONFIG
from inner.files import write_atomically


def keep_config(run_dir: Path, config: Config | RunConfig) -> None:
    """Write the resolved config into the run's folder if no launcher or island has done so yet."""
    with best_effort(f"{run_dir / CONFIG} was not written"):
        if not (run_dir / CONFIG).exists():
            write_atomically(run_dir / CONFIG, dump_config(config))


def replace_config(run_dir: Path, config: Config | RunConfig) -> None:
    """Replace the config that an earlier run of the same name left, if the two differ.

    Call it only after this island has entered the run: if other islands or its own checkpoint
    refuse the config, theirs must stay.
    """
    run = config.run if isinstance(config, Config) else config
    with best_effort(f"{run_dir / CONFIG} was not updated"):
        try:
            changed = differing_keys(run, load_config(run_dir / CONFIG).run)
        except ConfigError:
            changed = ["it is of another version"]
        if changed:
            write_atomically(run_dir / CONFIG, dump_config(config))
