"""Other runs in the same folder of runs, whose held-out loss the page can draw beside this
one's.
"""

from pathlib import Path

from diloco.records.metrics import EvalRecord, RoundRecord
from diloco.records.run_folder import island_folders, read_run

MOST_OTHERS = 40


def list_others(run_dir: Path) -> list[str]:
    """Return the names of the folders of other runs beside a run's folder, the newest first."""
    here = run_dir.resolve()
    try:
        folders = [
            each
            for each in here.parent.iterdir()
            if each.is_dir() and each != here and island_folders(each)
        ]
        newest = sorted(folders, key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [each.name for each in newest[:MOST_OTHERS]]


def read_losses(run_dir: Path) -> list[list[float]]:
    """Return seconds since the run's begin, tokens, held-out loss and bytes sent so far, for each
    evaluation.
    """
    islands = read_run(run_dir).islands
    records = sorted(
        (record for island in islands for record in island.all), key=lambda record: record.time
    )
    begin = min((begin for island in islands for begin, _ in island.spans), default=0.0)
    sent = 0
    rows: dict[int, list[float]] = {}
    for record in records:
        if isinstance(record, RoundRecord):
            sent += record.bytes_sent
        elif isinstance(record, EvalRecord) and record.loss is not None:
            rows.setdefault(record.tokens, [record.time - begin, record.tokens, record.loss, sent])
    return list(rows.values())
