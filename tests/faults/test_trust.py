"""Strangers and invalid messages of participants are rejected with a reason, and training goes
on.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outer.errors import PeerLost, TransportError
from outer.membership.rendezvous import serve_rendezvous
from outer.network.endpoints import Endpoint, Traffic
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth, read_run_key
from outer.routes.dialer import dial
from tests.faults.waits import GUARD_SECONDS, assert_one_history, more_rounds, reached, until
from tests.swarm import Swarm, swarm

transports = pytest.mark.parametrize(
    "transport", ["gloo", pytest.param("hivemind", marks=pytest.mark.slow)]
)
BOTH = ["island-0", "island-1"]


def key_file(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(name * 32)
    path.chmod(0o600)
    return str(path)


@contextmanager
def keyed(folder: Path, transport: str, address: str, stranger: dict) -> Iterator[Swarm]:
    """Two islands with one key that have committed some rounds. The third island, a stranger, is
    not started yet.
    """
    ours = key_file(folder, "k")
    rendezvous = serve_rendezvous("127.0.0.1", 0, read_run_key(Path(ours)))
    islands = [{"run_key_file": ours}, {"run_key_file": ours}, {"connect_seconds": 5} | stranger]
    settings = [
        "outer.rounds=5000",
        "outer.start_islands=2",
        f"outer.transport={transport}",
        f"name={folder.name}",
    ]
    try:
        with swarm(
            folder, *settings, islands=islands, address=address or rendezvous.address
        ) as made:
            for i in range(2):
                made.start(i)
            for island in made.started:
                reached(island, 2)
            yield made
    finally:
        rendezvous.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
@pytest.mark.parametrize("theirs", ["another", "none"])
def test_an_island_without_the_runs_key_cannot_get_in_and_is_told_why(
    tmp_path, place, transport, theirs
):
    stranger = {"run_key_file": key_file(tmp_path, "w")} if theirs == "another" else {}
    with keyed(tmp_path, transport, place(transport), stranger) as made:
        refused = made.start(2)
        assert refused.wait(GUARD_SECONDS) == [1]
        assert "run_key_file" in refused.log, refused.log[-2000:]
        assert not refused.records("step")
        for island in made.started[:2]:
            more_rounds(island, 3, BOTH)
        assert_one_history(*made.started[:2])


def test_strangers_that_speak_to_an_island_are_refused_and_counted(tmp_path):
    with keyed(tmp_path, "gloo", "", {}) as made:
        wrong = read_run_key(Path(key_file(tmp_path, "w")))
        peers = control_addresses(made)
        for name, key in (("liar", wrong), ("beggar", None)):
            asyncio.run(speak(peers[0], tmp_path.name, name, PeerAuth(key)))
        first = made.started[0]
        until(lambda: len(first.events("refused")) >= 2, "both are recorded", first)
        texts = "\n".join(first.events("refused"))
        assert "liar/0 does not hold the run key" in texts and "beggar/0 has no run key" in texts
        more_rounds(first, 3, BOTH)
        assert_one_history(*made.started)


def control_addresses(made: Swarm) -> list[str]:
    """Control addresses of the islands' leaders, as the rendezvous returns them to holders of the
    key.
    """
    from outer.membership.tcp import open_membership

    async def ask() -> list[str]:
        auth = PeerAuth(read_run_key(made.folder / "k"))
        membership = await open_membership(
            made.config.island.bootstrap, made.config.name, Endpoint("visitor", 0), 5.0, 10.0, auth
        )
        try:
            return [member.control_addresses[0] for member in (await membership.members()).values()]
        finally:
            await membership.close()

    return asyncio.run(ask())


async def speak(address: str, run: str, name: str, auth: PeerAuth) -> None:
    """Try to send a message to an island, which ignores it."""
    messenger = StreamMessenger(run, Endpoint(name, 0), dial, Traffic(), auth)
    try:
        with pytest.raises((PeerLost, TransportError)):
            await messenger.call(address, "status", b"{}", timeout_seconds=10)
    finally:
        await messenger.close()


@transports
def test_a_payload_of_nan_is_refused_and_its_sender_left_out_of_the_next_attempt(
    tmp_path, place, transport
):
    # Before three rounds have been measured nobody goes on without an island that is slow.
    islands = [{"faults": ["nan:1@round=2"]}] * 3
    settings = ["outer.rounds=5000", f"outer.transport={transport}", f"name={tmp_path.name}"]
    with swarm(tmp_path, *settings, islands=islands, address=place(transport)) as made:
        first, liar, third = made.start_all()
        for island in made.started:
            reached(island, 8)
        for honest in (first, third):
            attempts = [record for record in honest.records("round") if record["round"] == 2]
            aborted, committed = attempts[0], attempts[-1]
            assert not aborted["committed"] and aborted["participants"] == [
                "island-0",
                "island-1",
                "island-2",
            ]
            assert committed["committed"] and committed["participants"] == ["island-0", "island-2"]
        causes = [
            a["cause"] for i in (first, third) for a in i.records("round") if not a["committed"]
        ]
        assert any("island-1" in cause and "nan" in cause for cause in causes), causes
        assert any(
            "island-1" in text and "nan" in text
            for i in (first, third)
            for text in i.events("refused")
        )
        more_rounds(first, 2, ["island-0", "island-1", "island-2"])
        assert_one_history(first, liar, third)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_two_runs_at_one_place_do_not_mix(tmp_path, place, transport):
    settings = ["outer.rounds=5000", f"outer.transport={transport}"]
    rendezvous = serve_rendezvous("127.0.0.1", 0)
    address = place(transport) or rendezvous.address
    name = tmp_path.name
    try:
        with (
            swarm(
                tmp_path / "a", *settings, f"name={name}-a", islands=[{}, {}], address=address
            ) as one,
            swarm(
                tmp_path / "b",
                *settings,
                f"name={name}-b",
                "seed=7",
                islands=[{}, {}],
                address=address,
            ) as two,
        ):
            for made in (one, two):
                for island in made.start_all():
                    more_rounds(island, 3, BOTH)
            assert_one_history(*one.started)
            assert_one_history(*two.started)
            shared = one.started[0].committed().keys() & two.started[0].committed().keys()
            assert shared
            for number in shared:
                assert (
                    one.started[0].committed()[number]["digest"]
                    != two.started[0].committed()[number]["digest"]
                )
    finally:
        rendezvous.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_an_island_started_twice_is_refused_and_the_first_trains_on(tmp_path, place, transport):
    settings = ["outer.rounds=5000", f"outer.transport={transport}", f"name={tmp_path.name}"]
    with swarm(tmp_path, *settings, islands=[{}, {}], address=place(transport)) as made:
        first, other = made.start_all()
        reached(first, 2)
        twin = made.start(0, config=elsewhere(made, tmp_path / "twin"))
        assert twin.wait(GUARD_SECONDS) == [1]
        assert "an island 'island-0' is in the run already" in twin.log
        assert not twin.records("step")
        for island in (first, other):
            more_rounds(island, 3, BOTH)
        assert_one_history(first, other)


@transports
def test_an_island_with_another_config_is_told_which_keys_differ_and_the_run_goes_on(
    tmp_path, place, transport
):
    settings = [
        "outer.rounds=5000",
        f"outer.transport={transport}",
        f"name={tmp_path.name}",
        "outer.start_islands=1",
    ]
    with swarm(tmp_path, *settings, islands=[{}, {}], address=place(transport)) as made:
        first = made.start(0)
        reached(first, 2)
        other = made.start(1, config=made.config.model_copy(update={"seed": 7}))
        assert other.wait(GUARD_SECONDS) == [1]
        assert "seed: here 7, in the run 0" in other.log
        more_rounds(first, 3, ["island-0"])


def elsewhere(made: Swarm, folder: Path):
    """The swarm's config with other folders for the islands, as on another machine."""
    islands = tuple(island | {"run_dir": str(folder)} for island in made.config.islands)
    return made.config.model_copy(update={"islands": islands})
