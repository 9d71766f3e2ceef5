"""config.yaml in the folder of a run: the values with which it runs, for `diloco status`, `watch` and `report`.

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
    """Write the resolved config into the run's folder, unless the launcher or another island has done so."""
    with best_effort(f"{run_dir / CONFIG} was not written"):
        if not (run_dir / CONFIG).exists():
            write_atomically(run_dir / CONFIG, dump_config(config))


def replace_config(run_dir: Path, config: Config | RunConfig) -> None:
    """Write the resolved config in place of that of an earlier run of the same name with other values.

    Call it when this island has entered the run: with a config that others, or its own checkpoint, refuse it must not
    replace theirs.
    """
    run = config.run if isinstance(config, Config) else config
    with best_effort(f"{run_dir / CONFIG} was not brought up to date"):
        try:
            changed = differing_keys(run, load_config(run_dir / CONFIG).run)
        except ConfigError:
            changed = ["it is of another version"]
        if changed:
            write_atomically(run_dir / CONFIG, dump_config(config))
