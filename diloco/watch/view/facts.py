"""Read facts about a whole run, and about the machines of its islands, from the run's folder."""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco.formatting import one_line
from diloco.records.environment import read_environment
from diloco.records.run_folder import RunFacts, read_facts
from diloco.status.folder import read_run_config
from inner.errors import InputError

MAX_TEXT = 400


def describe_run(run_dir: Path) -> dict[str, Any]:
    """Return the run's name, inner steps per island, number of parameters and loss of the byte
    bigram model.

    Values that are not known are None. What run.json lacks is read from config.yaml, as for a run
    that `diloco simulate` did not launch.
    """
    facts = find_facts(run_dir)
    config = None if (run_dir / "run.json").exists() else read_run_config(run_dir)
    name = facts.name if facts else config.name if config else run_dir.resolve().name
    return {
        "name": name,
        "total_steps": facts.total_steps if facts else config.total_steps if config else None,
        "num_params": facts.num_params if facts else None,
        "bigram_loss": facts.bigram_loss if facts else None,
    }


def find_facts(run_dir: Path) -> RunFacts | None:
    """Return the content of run.json; None if there is no such file that can be read."""
    with suppress(InputError, OSError):
        return read_facts(run_dir)
    return None


def describe_machine(folder: Path) -> str:
    """Return one line about the code and hardware at the island's last start; empty if the island
    has not written them.
    """
    found = read_environment(folder) or {}
    commit = str(found.get("commit") or "")[:10]
    changed = " with changes" if commit and found.get("is_changed") else ""
    gpus = found.get("gpus")
    hardware = Counter(map(str, gpus)) if isinstance(gpus, list) and gpus else {str(found.get("processor") or ""): 1}
    words = [f"{count} x {name}" if count > 1 else name for name, count in hardware.items()]
    return one_line(", ".join(filter(None, [f"commit {commit}{changed}" if commit else "", *words])))[:MAX_TEXT]
