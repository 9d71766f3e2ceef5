"""config.yaml in a run's folder: its resolved config, for `diloco status`, `watch` and `report`.

A file that cannot be written costs a warning.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.config.overrides import differing_keys
from diloco.config.schema import Config, RunConfig, dump_config, load_config
from diloco.errors import ConfigError
from diloco.records.best_effort import best_effort
from diloco.records.run_folder import CONFIG, RunFacts, read_facts
from inner.errors import InputError
from inner.files import write_atomically


@dataclass(frozen=True)
class RunPlan:
    """What is known of a whole run before it begins, from config.yaml and run.json in its
    folder.
    """

    name: str
    """Its name; that of its folder if neither file can be read."""
    config: RunConfig | None
    facts: RunFacts | None

    @property
    def num_steps(self) -> int | None:
        """Inner steps of each island in the whole run."""
        return (
            self.config.total_steps
            if self.config
            else self.facts.total_steps
            if self.facts
            else None
        )

    @property
    def num_rounds(self) -> int | None:
        """Rounds of the whole run."""
        return self.config.outer.num_rounds if self.config else None


def read_plan(run_dir: Path) -> RunPlan:
    """Return what the files in a run's folder tell of the whole run. A damaged file tells
    nothing.
    """
    config = facts = None
    with suppress(ConfigError):
        config = load_config(run_dir / CONFIG).run
    with suppress(InputError, OSError):
        facts = read_facts(run_dir)
    name = config.name if config else facts.name if facts else run_dir.resolve().name
    return RunPlan(name, config, facts)


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
