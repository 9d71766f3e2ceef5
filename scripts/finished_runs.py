"""Keeps the results of an experiment's finished runs in one file for git, and restores them.

    python -m scripts.finished_runs keep FOLDER FILE      # FOLDER: the experiment's,
                                                          runs/experiments/NAME
    python -m scripts.finished_runs restore FILE FOLDER   # `diloco experiment` then makes only
                                                          missing runs

FILE has a line for each run, by the name of its folder, which ends in the hash of its config.
"""

import json
import sys
from pathlib import Path

from diloco.experiments.results.run_result import FINISHED
from inner.files import write_atomically


def keep(folder: Path, file: Path) -> int:
    """Add the results of the folder's finished runs to the file. Return the number of its runs."""
    found = read(file) | {
        path.parent.name: json.loads(path.read_text()) for path in folder.glob(f"runs/*/{FINISHED}")
    }
    lines = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(found.items())]
    write_atomically(file, "{\n" + ",\n".join(lines) + "\n}\n")
    return len(found)


def restore(file: Path, folder: Path) -> int:
    """Write the file's results into the experiment's folder, where they are missing.

    Return how many results were written.
    """
    found = {folder / "runs" / name / FINISHED: result for name, result in read(file).items()}
    missing = {path: result for path, result in found.items() if not path.exists()}
    for path, result in missing.items():
        write_atomically(path, json.dumps(result))
    return len(missing)


def read(file: Path) -> dict[str, object]:
    """Return the results by the names of their runs' folders; none if there is no such file."""
    return json.loads(file.read_text()) if file.exists() else {}


def main() -> None:
    """Run the command that the command line names."""
    what = sys.argv[1]
    source = Path(sys.argv[2])
    target = Path(sys.argv[3])
    count = {"keep": keep, "restore": restore}[what](source, target)
    print(f"{what}: {count} runs, {target}")


if __name__ == "__main__":
    main()
