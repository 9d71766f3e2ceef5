"""The account of the data over real processes: islands die, come back and join, and no unit is
trained twice.
"""

import signal
from pathlib import Path

import pytest

from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account, units_of
from diloco.report.summary import summarise
from diloco.report.summary_table import summary_rows
from tests.faults.waits import more_rounds, reached
from tests.swarm import swarm

STREAMING = ["outer.fragments=2", "outer.delay=1", "outer.mix=0.5"]


def assert_each_unit_once(run_dir: Path) -> None:
    """Check that committed rounds trained each unit once and, with the open units, cover all up to
    the frontier.
    """
    run = read_run(run_dir)
    account = data_account(run.islands)
    assert account["units_repeated"] == 0 and account["units_trained"] > 0
    # The record is missing if an island was killed right after a commit.
    committed = [
        units_of(record) for island in run.islands for record in island.rounds if record.committed
    ]
    assert len({unit for units in committed for unit in units}) >= account["units_trained"] * 0.9
    assert "Units trained, repeated, unused" in {
        what for what, _, _ in summary_rows(summarise(run_dir))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [[], STREAMING, ["outer.missed_progress=drop"]], ids=["plain", "streaming", "drop"]
)
def test_islands_die_return_and_join_and_no_unit_is_trained_twice(tmp_path, settings):
    common = [
        "outer.rounds=40",
        "outer.inner_steps=4",
        "outer.start_islands=2",
        "name=run",
        *settings,
    ]
    islands = [{"faults": [f"slow:{i}x5" for i in range(4)]}, {}, {"joins": True}, {"joins": True}]
    with swarm(tmp_path, *common, islands=islands) as made:
        first, victim = made.start(0), made.start(1)
        reached(first, 3)
        joiners = [made.start(2), made.start(3)]
        victim.signal(signal.SIGKILL)
        victim.wait()
        reached(joiners[0], 6)
        again = made.start(1)
        more_rounds(again, 2)
        joiners[1].signal(signal.SIGSTOP)
        more_rounds(again, 3)
        joiners[1].signal(signal.SIGCONT)
        for island in (first, again, *joiners):
            island.finish(200)
        (account,) = {island.events("account")[-1] for island in (first, again, *joiners)}
        assert "units of text trained" in account
        assert_each_unit_once(tmp_path / "run")
