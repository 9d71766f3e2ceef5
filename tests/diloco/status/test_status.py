"""`diloco status` of real islands: asked over the network, and read from a folder."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from diloco.config.schema import parse_config
from diloco.errors import ConfigError
from diloco.records.metrics import EventRecord, Metrics
from diloco.status.command import find_status, status
from diloco.status.reply import CALL, IslandStatus, Place, StatusServer
from diloco.status.table import format_run
from inner.errors import InputError
from outer.errors import MessageError, UnreachableError
from outer.network.messages import parse
from outer.state.part_state import Position
from tests.diloco.doctor.visits import enter, run_text
from tests.diloco.own_loop.loops import train_small
from tests.diloco.sample_records import a_round, a_step
from tests.faults.waits import until
from tests.outer.nets import KINDS, A, B, run, swarm
from tests.swarm import read_records
from tests.swarm import swarm as islands_of

ENDLESS = "outer.rounds=100000"
PLACE = Place(
    island="b", num_steps=6, num_rounds=3, ranks=2, mesh="dp_shard2", hardware="CPU (x86_64)"
)


@pytest.mark.parametrize("kind", ["gloo", "tls"])
def test_islands_tell_where_they_are_and_go_on_training(tmp_path: Path, kind: str) -> None:
    with islands_of(tmp_path, ENDLESS, f"outer.transport={kind}", islands=[{}, {}]) as made:
        islands = made.start_all()
        for island in islands:
            island.wait_for_round(1)
        (seen,) = find_status(made.address, [], None)
        assert [island.name for island in seen.islands] == ["island-0", "island-1"]
        for island in seen.islands:
            told = island.status
            assert told is not None, island.state
            assert told.round >= 2 and told.tokens == told.round * 2 * 2 * 512 and told.step >= 4
            assert told.loss is not None and told.committed >= 2 and told.ranks == 1
            assert island.path.startswith("direct 127.0.0.1:" if kind == "tls" else "direct ")
        assert seen.num_rounds == 100000 and seen.config_hash == made.config.run.hash
        for island in islands:
            island.wait_for_round((seen.islands[0].round or 0) + 3)
            assert not island.events("refused")


def test_an_island_that_is_frozen_is_shown_with_its_record_and_the_exit_status_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with islands_of(tmp_path, ENDLESS, "outer.transport=gloo", islands=[{}]) as made:
        island = made.start(0)
        island.wait_for_round(0)
        assert status(made.address, [], None, as_json=False) == 0
        assert "\n  island-0: " in capsys.readouterr().out
        island.signal(signal.SIGSTOP)
        assert status(made.address, [], None, as_json=True) == 1
        island.signal(signal.SIGCONT)
        (frozen,) = json.loads(capsys.readouterr().out)[0]["islands"]
        assert (
            "no answer within" in frozen["state"]
            and frozen["round"] >= 1
            and not frozen["answered"]
        )


def test_a_loop_of_ones_own_tells_its_state(tmp_path: Path) -> None:
    with islands_of(tmp_path, islands=[{}]) as made:
        made.start(0, train_small(rounds=1_000_000))
        records = tmp_path / "own/island-0/metrics.jsonl"
        until(lambda: any(record["kind"] == "round" for record in read_records(records)), "a round")
        (seen,) = find_status(made.address, [], "own")
        (told,) = seen.islands
        assert told.status is not None and told.status.mesh == "its own loop", told.state


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_what_the_records_said_last(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with swarm(kind) as place:
            caller, island = await place.open(A), await place.open(B)
            metrics = Metrics(tmp_path / "metrics.jsonl")
            StatusServer(
                island.messenger, metrics, PLACE, lambda: Position(round=2, tokens=99), None
            )
            metrics.write(a_step(3, loss=float("nan")))
            metrics.write(a_round(1))
            metrics.write(EventRecord(name="joined", text="\x1b[2Jat round 3" + "x" * 1000))
            reply = await caller.messenger.call(
                island.messenger.address, CALL, b"", timeout_seconds=20
            )
            told = parse(IslandStatus, reply)
            assert (told.step, told.loss, told.round, told.tokens, told.committed) == (
                3,
                None,
                2,
                99,
                1,
            )
            assert (
                told.event.startswith("joined:")
                and "\x1b" not in told.event
                and len(told.event) == 300
            )
            with pytest.raises(MessageError, match="none expected"):
                await caller.messenger.call(
                    island.messenger.address, CALL, b"x", timeout_seconds=20
                )

    run(main())


def test_an_island_of_an_older_version_is_named_as_such() -> None:
    async def main() -> None:
        async with swarm("gloo", "test") as place:
            await enter(place, A)
            (seen,) = await asyncio.to_thread(find_status, place.bootstrap[0], [], None)
            assert (
                "another version of diloco" in seen.islands[0].state and seen.islands[0].round == 3
            )
            assert any("  a" in line and "  3  " in line for line in format_run(seen))

    run(main())


def test_states_that_differ_are_told() -> None:
    async def main() -> None:
        async with swarm("gloo", "test") as place:
            await enter(place, A, digest="aa" * 16)
            await enter(place, B, digest="bb" * 16)
            (seen,) = await asyncio.to_thread(find_status, place.bootstrap[0], [], None)
            assert "States DIFFER after 3 rounds" in list(format_run(seen))[-1]

    run(main())


def test_a_folder_tells_the_last_of_its_records(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(run_text("gloo"))
    for name in ("island-0", "island-1"):
        metrics = Metrics(tmp_path / name / "metrics.jsonl")
        for record in (a_step(1), a_step(2), a_round(0), a_round(1, committed=False)):
            metrics.write(record)
        metrics.close()
    Metrics(tmp_path / "island-1/metrics.jsonl").write(
        EventRecord(name="left", text="the run is done")
    )
    (seen,) = find_status(str(tmp_path), [], None)
    text = "\n".join(format_run(seen))
    assert seen.num_steps == parse_config(run_text("gloo")).run.total_steps
    assert "island-0: last record 0." in text and "island-1: left 0." in text
    assert "  2/6" in text and "1/1" in text and "2 after 1 rounds" in text


@pytest.mark.parametrize(
    ("target", "overrides", "text"),
    [
        ("runs/nowhere", [], "neither the folder of a run"),
        ("nonsense", [], "nor an address that `diloco bootstrap` prints"),
        (".", ["island.proxy=http://127.0.0.1:1"], "is for an address"),
        ("tcp://127.0.0.1:1", ["outer.codec=int8"], "outer.codec"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_cure(
    target: str, overrides: list[str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        find_status(target, overrides, None)


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run in"):
        find_status(str(tmp_path), [], None)


def test_an_address_where_nothing_listens_is_said() -> None:
    with pytest.raises(UnreachableError, match="did not answer within 2 s"):
        find_status("tcp://127.0.0.1:1", ["island.connect_seconds=2"], None)
