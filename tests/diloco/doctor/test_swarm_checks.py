"""`diloco doctor` against real swarms: what is in order, and each thing that users stumble over."""

import re
import socket
import time

import pytest

from diloco.config.schema import dump_config, parse_config
from diloco.doctor.diagnose import doctor
from diloco.errors import ConfigError
from diloco.swarm.visit import host_of
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.diagnostics import DiagnosticsServer, ProbeResponder
from outer.membership.rendezvous import serve_rendezvous
from outer.network.run_key import RunKey
from tests.diloco.doctor.visits import (
    enter,
    entered,
    free_port,
    key_file,
    refusing_port,
    run_text,
    texts,
    troubles,
    visited,
)
from tests.outer.nets import A, B, C, run, swarm
from tests.outer.routes.relays import addresses, relays
from tests.swarm import swarm as islands_of

real_kinds = pytest.mark.parametrize("kind", ["gloo", "tls", "hivemind"])


@real_kinds
def test_a_swarm_in_order_passes_and_does_not_take_the_doctor_for_an_island(kind):
    async def main() -> None:
        async with entered(kind, A, B) as place:
            lines = await visited(place.bootstrap[0], config_text=run_text(kind))
            assert troubles(lines) == [], lines
            assert [line for line in lines if str(line).startswith("Island")] == [
                "Island a of run test",
                "Island b of run test",
            ]
            for name in (
                "reach",
                "round trip",
                "clock",
                "bandwidth down",
                "bandwidth up",
                "call back",
            ):
                assert len(texts(lines, name)) == 2, name
            assert all(
                float(text.split()[0].replace(",", "")) > 0
                for text in texts(lines, "bandwidth down")
            )
            for network in place.networks:
                assert network.membership is not None
                assert set(await network.membership.members()) <= {"a", "b"}

    run(main())


@real_kinds
def test_an_island_that_cannot_be_called_back_and_one_whose_clock_is_wrong_are_found(kind):
    async def main() -> None:
        async with swarm(kind, "test") as place:
            await enter(place, A, lambda: time.time() + 60)
            away = ["island.announce_host=127.0.0.9", f"island.listen_port={free_port()}"]
            lines = await visited(place.bootstrap[0], *away)
            clock = "FAILED" if kind == "hivemind" else "warning"
            assert troubles(lines) == [(clock, "clock"), ("warning", "call back")], lines
            ahead = re.match(r"([0-9.]+) s ahead", texts(lines, "clock")[0])
            assert ahead is not None and 50 < float(ahead[1]) < 70
            assert "only addresses of the calling host, 127.0.0.1," in texts(lines, "call back")[0]
            assert "set island.announce_host" in texts(lines, "call back")[0]
            assert ("relay=client" in texts(lines, "call back")[0]) == (kind == "hivemind")

    run(main())


def test_an_island_behind_a_dead_address_is_found_and_the_others_are_examined():
    async def main() -> None:
        async with entered("gloo", B) as place:
            await enter(place, A, control_addresses=[f"127.0.0.1:{refusing_port()}"])
            lines = await visited(place.bootstrap[0])
            assert troubles(lines) == [("FAILED", "reach")]
            assert (
                "open the ports" in texts(lines, "reach")[0]
                and "1 of 1 ranks answer" in texts(lines, "reach")[1]
            )

    run(main())


def test_a_rank_that_cannot_be_called_is_named():
    async def main() -> None:
        async with swarm("gloo", "test") as place:
            network = await enter(place, A)
            assert network.membership is not None
            await enter(
                place,
                B,
                control_addresses=[network.messenger.address, f"127.0.0.1:{refusing_port()}"],
            )
            lines = await visited(place.bootstrap[0])
            assert ("FAILED", "reach") in troubles(lines)
            assert "1 of 2 ranks cannot be called from here; rank 1" in texts(lines, "reach")[1]

    run(main())


@pytest.mark.parametrize(
    ("kind", "begin", "name"),
    [("gloo", "gloo:a/0", "payload ports"), ("tls", f"tls:{'0' * 64}", "path of payloads")],
)
def test_a_port_that_takes_no_payloads_is_found(kind, begin, name):
    async def main() -> None:
        async with swarm(kind, "test") as place:
            await enter(place, A, transport_addresses=[f"{begin}@127.0.0.1:{refusing_port()}"])
            assert troubles(await visited(place.bootstrap[0])) == [("FAILED", name)]

    run(main())


def test_the_path_to_each_island_is_said_and_why_it_is_that_one():
    async def main() -> None:
        async with relays() as [relay], swarm("tls", "test") as place:
            [by_relay] = addresses([relay])
            await enter(place, A)
            await enter(place, B, own={"relays": [by_relay], "announce_host": "127.0.0.9"})
            await enter(place, C, own={"relays": [by_relay]})
            lines = await visited(place.bootstrap[0])
            assert troubles(lines) == []
            direct, after_refusal, only = texts(lines, "path of payloads")
            assert direct.startswith("rank 0: direct 127.0.0.1:") and "because" not in direct
            assert f"by the relay {by_relay}, because direct 127.0.0.9:" in after_refusal
            assert f"by the relay {by_relay}, because its record lists no direct address" in only
            await relay.close()
            lines = await visited(place.bootstrap[0])
            assert troubles(lines) == [("FAILED", "reach"), ("FAILED", "reach")]

    run(main())


def test_an_island_that_listens_for_its_relays_only_can_be_called_back():
    async def main() -> None:
        async with relays() as [relay], entered("tls", A) as place:
            lines = await visited(place.bootstrap[0], f"island.relays={addresses([relay])}")
            assert (
                troubles(lines) == [] and "it can call this machine" in texts(lines, "call back")[0]
            )

    run(main())


def test_a_port_that_leads_to_another_machine_is_no_call_back():
    async def main() -> None:
        async with entered("gloo", A) as place:
            other = await place.open(B)
            DiagnosticsServer(other.messenger, ProbeResponder())
            port = other.messenger.address.rpartition(":")[2]
            # The doctor cannot have the port itself, but listens on it at another address of this
            # machine.
            lines = await visited(
                place.bootstrap[0],
                "island.listen_host=127.0.0.5",
                "island.announce_host=127.0.0.1",
                f"island.listen_port={port}",
            )
            assert troubles(lines) == [("FAILED", "call back")]
            assert "leads to another machine" in texts(lines, "call back")[0]

    run(main())


def test_a_taken_port_is_said_and_the_islands_are_examined_all_the_same():
    async def main() -> None:
        async with entered("gloo", A) as place:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                lines = await visited(
                    place.bootstrap[0], f"island.listen_port={taken.getsockname()[1]}"
                )
            assert troubles(lines) == [("FAILED", "call back")]
            assert len(texts(lines, "round trip")) == 1

    run(main())


def test_another_config_is_found_and_its_keys_are_named():
    async def main() -> None:
        async with entered("gloo", A) as place:
            ours = dump_config(parse_config(run_text("gloo"), ["outer.codec=int8", "seed=4"]).run)
            lines = await visited(place.bootstrap[0], config_text=ours)
            assert troubles(lines) == [("FAILED", "config")]
            assert (
                "outer.codec" in texts(lines, "config")[0] and "seed" in texts(lines, "config")[0]
            )

    run(main())


def test_states_that_differ_in_one_round_are_found():
    async def main() -> None:
        async with swarm("gloo", "test") as place:
            await enter(place, A, digest="aa" * 16)
            await enter(place, B, digest="bb" * 16)
            assert troubles(await visited(place.bootstrap[0])) == [("warning", "islands")]

    run(main())


def test_a_swarm_without_the_run_says_which_runs_there_are():
    async def main() -> None:
        async with entered("gloo", A) as place:
            other = run_text("gloo").replace("name: test", "name: other")
            lines = await visited(place.bootstrap[0], config_text=other)
            assert troubles(lines) == [("warning", "run")]
            assert "there: test" in texts(lines, "run")[0]

    run(main())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{}", "/ip4/127.0.0.1/tcp/{}/p2p/12D3KooWBad"])
def test_an_address_where_nothing_listens_is_said_at_once(address):
    lines = run(visited(address.format(refusing_port())))
    assert troubles(lines) == [("FAILED", "address")]
    assert "refused" in texts(lines, "address")[0]


@pytest.mark.parametrize("address", ["nonsense", "tcp://nowhere", "/ip4/127.0.0.1"])
def test_an_address_that_is_none_is_said(address):
    assert troubles(run(visited(address))) == [("FAILED", "swarm")]


@pytest.mark.parametrize("ours", [None, b"o" * 32])
def test_a_missing_or_wrong_run_key_is_said_over_tcp(tmp_path, ours):
    rendezvous = serve_rendezvous("127.0.0.1", 0, RunKey(b"k" * 32))
    try:
        lines = run(
            visited(rendezvous.address, *key_file(tmp_path, ours), "island.connect_seconds=10")
        )
    finally:
        rendezvous.close()
    assert troubles(lines) == [("FAILED", "run key")]
    assert "island.run_key_file" in texts(lines, "run key")[0]


def test_a_missing_run_key_is_said_over_hivemind():
    async def main() -> None:
        own = NetworkSettings("test", "a", 0, run_key=RunKey(b"k" * 32))
        network = await open_network("hivemind", own)
        try:
            assert network.membership is not None
            await network.membership.publish_config(run_text("hivemind"))
            lines = await visited(network.transport.address.partition("@")[2])
        finally:
            await network.close()
        assert troubles(lines) == [("FAILED", "run key")]
        assert "same key" in texts(lines, "run key")[0]

    run(main())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://10.0.0.1:5", ("10.0.0.1", 5)),
        ("tcp://[::1]:5", ("::1", 5)),
        ("/ip4/10.0.0.1/tcp/5/p2p/Qm", ("10.0.0.1", 5)),
        ("/dns/example.org/tcp/5/p2p/Qm", ("example.org", 5)),
        ("/ip4/10.0.0.1/udp/5/quic", None),
        ("10.0.0.1:5", None),
    ],
)
def test_host_and_port_of_an_address(address, expected):
    assert host_of(address) == expected


def test_a_training_island_is_examined_and_the_exit_status_says_whether_all_is_well(
    tmp_path, capsys, caplog
):
    with islands_of(tmp_path, "outer.rounds=100000", islands=[{}]) as made:
        island = made.start(0)
        island.wait_for_round(0)
        assert doctor([made.address], None, None) == 0
        told = capsys.readouterr().out
        assert "Island island-0 of run test\n  ok      reach" in told and "call back" in told
        assert re.search(r"\n0 FAILED, 0 warnings, [0-9]+ ok\n$", told)
        assert not [record for record in caplog.records if record.name == "asyncio"], (
            "it leaves no task behind"
        )
    assert doctor([made.address], None, None) == 1, "the swarm is gone now"


def test_a_second_address_is_the_users_mistake():
    with pytest.raises(ConfigError, match="one address"):
        doctor(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], None, None)
