"""`diloco watch ADDRESS` of real islands: their records come over the network, and who is lost is
seen.
"""

import signal
import time
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.watch.collection.collector import Collector
from diloco.watch.command import Watched, check, open_views
from diloco.watch.view.run_view import RunView
from diloco.watch.view.state import state_now
from tests.faults.waits import until
from tests.swarm import GUARD_SECONDS, Island, read_records
from tests.swarm import swarm as islands_of

ENDLESS = "outer.rounds=100000"


def told(view: RunView, name: str) -> dict:
    view.read()
    return next((island for island in state_now(view)["islands"] if island["name"] == name), {})


@pytest.mark.parametrize("kind", ["gloo", "tls"])
def test_records_of_islands_that_end_have_come_whole(tmp_path: Path, kind: str) -> None:
    settings = ("outer.rounds=6", f"outer.transport={kind}", f"island.run_dir={tmp_path / 'runs'}")
    with islands_of(tmp_path, *settings, islands=[{}, {}]) as made:
        islands = made.start_all()
        islands[0].wait_for_round(0)
        with open_views(Watched(made.address, [], None, tmp_path / "kept")) as ((view,), _):
            for island in islands:
                island.finish()
            for island in islands:
                path = view.run_dir / island.folder.name / "metrics.jsonl"
                own = read_records(island.folder / "metrics.jsonl")
                until(
                    lambda path=path, own=own: read_records(path) == own, "the last record", island
                )
            assert told(view, "island-1")["end"] == "left"


def find_loss(survivors: list[Island], name: str) -> float | None:
    """When the first of the survivors recorded that it lost the island."""
    times = [
        r["time"]
        for each in survivors
        for r in each.records("event")
        if r["name"] == "lost" and name in r["text"]
    ]
    return min(times, default=None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_island_is_shown_as_lost_once_the_others_know(tmp_path: Path, number: int) -> None:
    settings = (ENDLESS, f"island.run_dir={tmp_path / 'runs'}", "outer.transport=tls")
    with islands_of(tmp_path, *settings, islands=[{}, {}, {}]) as made:
        islands = made.start_all()
        for island in islands:
            island.wait_for_round(1)
        with open_views(Watched(made.address, [], None, None)) as ((view,), _):
            until(lambda: told(view, "island-2").get("committed"), "records of island-2", *islands)
            assert not told(view, "island-2")["is_wrong"]
            islands[2].signal(number)
            began = time.time()
            deadline = time.monotonic() + GUARD_SECONDS
            while not told(view, "island-2")["is_wrong"]:
                assert time.monotonic() < deadline, "it was never shown"
                time.sleep(0.01)
            shown = time.time()
            until(lambda: find_loss(islands[:2], "island-2"), "the loss", *islands)
            known = find_loss(islands[:2], "island-2") or 0.0
            print(f"others knew after {known - began:.2f} s, shown after {shown - began:.2f} s")
            state = told(view, "island-2")["state"]
            assert "no answer" in state or "lost to" in state
            assert not told(view, "island-0")["is_wrong"]


def test_a_watcher_goes_on_where_an_earlier_one_stopped(tmp_path: Path) -> None:
    settings = (ENDLESS, "outer.transport=gloo", f"island.run_dir={tmp_path / 'runs'}")
    with islands_of(tmp_path, *settings, islands=[{}]) as made:
        island = made.start(0)
        island.wait_for_round(2)
        for number in (2, 6):
            island.wait_for_round(number)
            with open_views(Watched(made.address, [], None, tmp_path / "kept")) as ((view,), _):
                path = view.run_dir / "island-0/metrics.jsonl"
                until(
                    lambda path=path, n=number: any(
                        r.get("round") == n for r in read_records(path)
                    ),
                    "it",
                    island,
                )
        copied = read_records(path)
        assert copied == read_records(island.folder / "metrics.jsonl")[: len(copied)]


def test_the_ranks_of_an_island_record_where_their_time_went(tmp_path: Path) -> None:
    settings = ("outer.rounds=2", "outer.transport=gloo", f"island.run_dir={tmp_path / 'runs'}")
    with islands_of(tmp_path, *settings, islands=[{"ranks": 2}]) as made:
        island = made.start(0)
        island.finish()
        for record in island.committed().values():
            assert [row[0] for row in record["ranks"]] == [0.0, 1.0]
            for _, seconds, data, computing, ready, between, stopped in record["ranks"]:
                assert (
                    0 <= data <= seconds
                    and 0 < computing <= seconds
                    and 0 <= ready <= seconds
                    and between >= 0
                )
                assert stopped >= 0
    view = RunView(island.folder.parent)
    view.read()
    assert [row[1] for row in view.islands["island-0"].rows["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (Watched("tcp://127.0.0.1:1", ["outer.codec=int8"], None, None), "outer.codec"),
        (Watched("runs/a", ["island.proxy=x"], None, None), "is for an address"),
        (Watched("runs/a", [], "name", None), "--run name, which is for an address"),
        (Watched("runs/a", ["runs/b", "runs/c"], None, None), "allowed: at most two"),
    ],
)
def test_words_that_do_not_belong_together_are_refused(
    words: Watched, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        check(words)
        Collector(words.target, words.more, words.run_name, tmp_path)
