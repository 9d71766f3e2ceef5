"""The losses of another run in the same folder of runs, which the page draws beside this run's."""

from pathlib import Path

from diloco.watch.view.overlay import list_others, read_losses
from tests.diloco.report.sample_run import write_run


def test_runs_in_the_same_folder_are_offered_and_nothing_else(tmp_path: Path) -> None:
    here = write_run(tmp_path / "here")
    write_run(tmp_path / "earlier")
    (tmp_path / "notes").mkdir()
    assert list_others(here) == ["earlier"]


def test_losses_are_told_by_time_tokens_and_bytes(tmp_path: Path) -> None:
    rows = read_losses(write_run(tmp_path / "run"))
    seconds, tokens, losses, sent = zip(*rows, strict=True)
    assert len(rows) > 2 and losses[-1] < losses[0]
    for axis in (seconds, tokens, sent):
        assert list(axis) == sorted(axis)
    assert sent[-1] > 0
