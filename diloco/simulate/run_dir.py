"""The folder of a simulated run: created when the run begins, found when it is resumed."""

from datetime import UTC, datetime
from pathlib import Path

from diloco.config.check import bigram_baseline, check_run, count_params
from diloco.config.overrides import differing_keys
from diloco.config.schema import Config, dump_config, load_config
from diloco.errors import ConfigError
from diloco.records.best_effort import best_effort
from diloco.records.run_folder import FACTS, RunFacts, write_facts
from inner.files import make_folder, write_atomically


def prepare_run(config: Config, links: str, *, resume: bool) -> tuple[RunFacts, Path]:
    """Check the run, then create or find its folder, and write the config and the facts into it.

    `links`: the values of `--link`, joined. Raises ConfigError and InputError.
    """
    num_islands = len(config.islands)
    corpus = check_run(config, num_islands)
    parent = config.island.runs
    run_dir = find_run_dir(parent, config) if resume else new_run_dir(parent, config.name)
    config = config.model_copy(update={"name": run_dir.name})
    write_atomically(run_dir / "config.yaml", dump_config(config))
    facts = RunFacts(
        name=config.name,
        num_params=count_params(config.run, corpus),
        num_islands=num_islands,
        total_steps=config.total_steps,
        bigram_loss=bigram_baseline(corpus),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        links=links,
    )
    with best_effort(f"{run_dir / FACTS} was not written"):
        write_facts(run_dir, facts)
    return facts, run_dir


def new_run_dir(parent: Path, name: str) -> Path:
    """Create the folder NAME, or NAME-2, NAME-3, ... if it exists, so that no run is overwritten.

    Raises InputError if `parent` cannot be written to, and ConfigError after 10,000 runs.
    """
    make_folder(parent, "island.run_dir")
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{parent} holds too many runs called {name!r}; choose another name=...")


def find_run_dir(parent: Path, config: Config) -> Path:
    """Return the folder of the run of that name. Raises ConfigError if there is none, or if its
    values are different.
    """
    folder = parent / config.name
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"--resume: there is no run in {str(folder)!r}; leave it out to begin one, or set "
            "name=..."
        )
    if changed := differing_keys(config.run, load_config(folder / "config.yaml").run):
        raise ConfigError(
            f"--resume: {str(folder)!r} is a run with other values:\n  " + "\n  ".join(changed)
        )
    return folder
