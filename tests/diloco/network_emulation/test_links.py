"""Links between network namespaces: parsing of --link, counted bytes, rates and delays."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.formatting import parse_bits_per_second, parse_seconds
from diloco.network_emulation.delay_relay import OFFLOAD_HEADER, destinations, link_layer_address
from diloco.network_emulation.links import (
    AccessLink,
    Links,
    attach,
    burst_bytes,
    count_bytes,
    open_links,
    parse_link,
    parse_links,
    queue_bytes,
    relay_warning,
    sent_bytes,
)
from diloco.network_emulation.namespaces import Namespace, list_namespaces
from diloco.simulate.fleet import Fleet, assign_namespace

IS_ROOT = os.geteuid() == 0 and shutil.which("ip") is not None
needs_root = pytest.mark.skipif(not IS_ROOT, reason="network namespaces need root")
RTT = AccessLink(1e8, 0.2)
SIZE = 200_000
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7002)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16): pass
    connection.sendall(b"done")
"""
CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7002), 20) as connection:
    started_at = time.monotonic()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(4) == b"done"
    print(time.monotonic() - started_at)
"""


@contextmanager
def serving(place: Namespace) -> Iterator[None]:
    """Serve one connection in the namespace: receive everything, then answer."""
    command = place.command(sys.executable, "-S", "-c", SERVER, place.host)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
            yield
        finally:
            server.kill()


def seconds_to_send(size: int, source: Namespace, target: Namespace) -> float:
    """Seconds to send `size` bytes from one namespace to another and receive an answer."""
    command = source.command(sys.executable, "-S", "-c", CLIENT, target.host, str(size))
    with serving(target):
        return float(subprocess.run(command, check=True, capture_output=True, timeout=180).stdout)


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_rates_and_times_are_read_with_their_units():
    assert [parse_bits_per_second(text) for text in ("100mbit", "2.5 Gbit/s", "64kbit")] == [
        1e8,
        2.5e9,
        64e3,
    ]
    assert [parse_seconds(text) for text in ("50ms", "0.5s", "20us", "0ms")] == pytest.approx(
        [0.05, 0.5, 2e-5, 0]
    )


@pytest.mark.parametrize(
    "text", ["", "100", "mbit", "100mb", "-1mbit", "0mbit", "nanmbit", "1e400gbit", "1,5gbit"]
)
def test_a_mistyped_rate_is_refused_with_what_is_allowed(text: str):
    with pytest.raises(ConfigError, match=r"is not a bit rate; allowed: .*bit, kbit, mbit, gbit"):
        parse_bits_per_second(text)


@pytest.mark.parametrize("text", ["", "50", "ms", "-1ms", "infs", "5min"])
def test_a_mistyped_time_is_refused_with_what_is_allowed(text: str):
    with pytest.raises(ConfigError, match=r"is not a time; allowed: .*us, ms, s"):
        parse_seconds(text)


def test_a_link_is_a_rate_and_if_need_be_an_island_and_a_round_trip():
    assert parse_link("100mbit") == (None, AccessLink(1e8))
    assert parse_link("1gbit,rtt=50ms") == (None, AccessLink(1e9, 0.05))
    assert parse_link("3:20mbit,rtt=1s") == (3, AccessLink(2e7, 1.0))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("100mb", "--link 100mb: '100mb' is not a bit rate"),
        ("100mbit,rtt=50", "--link 100mbit,rtt=50: '50' is not a time"),
        ("100mbit,delay=5ms", "--link 100mbit,delay=5ms: allowed: "),
        ("100mbit,rtt=5ms,rtt=6ms", "allowed: "),
        ("x:100mbit", "allowed: "),
        (":100mbit", "allowed: "),
        ("1kbit", "a rate of 64kbit to"),
        ("1gbit,rtt=11s", "an rtt of at most 10s"),
    ],
)
def test_a_mistyped_link_is_refused_with_where_and_what_is_allowed(text: str, cause: str):
    with pytest.raises(ConfigError) as error:
        parse_link(text)
    assert cause in str(error.value) and "--link" in str(error.value)


def test_an_island_has_its_own_link_or_that_of_all():
    links = parse_links(["1:20mbit", "1gbit"], num_islands=2)
    assert [links.of(target) for target in (0, 1, 2, "bootstrap")] == [
        AccessLink(1e9),
        AccessLink(2e7),
        AccessLink(1e9),
        AccessLink(1e9),
    ]
    assert parse_links(["1:20mbit"], num_islands=2).of(0) is None


@pytest.mark.parametrize("texts", [["1gbit", "2gbit"], ["0:1gbit", "0:1gbit"]])
def test_a_link_given_twice_is_refused(texts: list[str]):
    with pytest.raises(ConfigError, match="given twice"):
        parse_links(texts, num_islands=2)


def test_the_link_of_an_island_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no island 2; islands are 0 to 1"):
        parse_links(["2:1gbit"], num_islands=2)


@pytest.mark.parametrize("rate", [64e3, 1e6, 1e8, 1e9, 1e11])
def test_a_burst_holds_a_frame_and_a_millisecond_and_a_queue_holds_a_round_trip(rate: float):
    assert burst_bytes(AccessLink(rate)) >= max(1514, rate / 8 * 0.001)
    assert queue_bytes(AccessLink(rate, 0.3)) >= rate / 8 * 0.3


def test_a_frame_leaves_by_the_port_of_its_address_by_all_if_it_is_for_all_and_else_by_none():
    ports = dict.fromkeys([1, 2, 3])

    def to(address: str) -> list[int]:
        return destinations(
            bytes(OFFLOAD_HEADER) + bytes.fromhex(address.replace(":", "")), 1, ports
        )  # type: ignore[arg-type]

    assert to(link_layer_address(2)) == [2]
    assert to("ff:ff:ff:ff:ff:ff") == [2, 3]
    assert (
        to(link_layer_address(1))
        == to(link_layer_address(9))
        == to("02:00:00:00:00:00")
        == to("")
        == []
    )


@needs_root
def test_a_link_carries_no_more_than_its_rate_and_counts_what_it_has_carried():
    link = AccessLink(4e6)
    with open_links(Links(link)) as net:
        a, b = (attach(net, link) for _ in range(2))
        assert net.relay is None, "nothing is delayed"
        assert seconds_to_send(SIZE, a, b) > 0.9 * SIZE * 8 / link.rate
        (up, _), (_, down) = count_bytes(net, a), count_bytes(net, b)
        assert SIZE < up < 1.2 * SIZE and SIZE < down < 1.2 * SIZE


@needs_root
def test_a_link_that_is_not_shaped_counts_every_frame_with_its_headers():
    with open_links(Links()) as net:
        a, b = (attach(net, None) for _ in range(2))
        seconds_to_send(SIZE, a, b)
        assert 1.03 * SIZE < sent_bytes(a) < 1.2 * SIZE


@needs_root
def test_a_link_with_a_round_trip_delays_both_ways_and_can_be_cut():
    with open_links(Links(RTT)) as net:
        a, b, c = (attach(net, RTT) for _ in range(3))
        assert seconds_to_send(1, a, b) >= 0.95 * RTT.rtt
        net.cut([a], [b])
        with pytest.raises(subprocess.CalledProcessError), serving(b):
            code = f"import socket; socket.create_connection(({b.host!r}, 7002), 0.6)"
            subprocess.run(
                a.command(sys.executable, "-S", "-c", code),
                check=True,
                capture_output=True,
                timeout=180,
            )
        assert seconds_to_send(1, a, c) >= 0.95 * RTT.rtt
        net.heal([a], [b])
        assert seconds_to_send(1, b, a) >= 0.95 * RTT.rtt


@needs_root
def test_an_islands_own_round_trip_counts_half():
    links = Links(AccessLink(1e8), {0: RTT})
    with open_links(links) as net:
        a, b = (attach(net, links.of(target)) for target in range(2))
        assert 0.95 * RTT.rtt / 2 <= seconds_to_send(1, a, b)


@needs_root
def test_the_relay_and_the_namespaces_go_when_the_run_fails():
    with pytest.raises(ZeroDivisionError), open_links(Links(RTT)) as net:
        if net.relay is None:
            pytest.skip("this kernel has netem")
        place, pid = attach(net, RTT), net.relay.pid
        assert is_alive(pid) and place.name in list_namespaces()
        raise ZeroDivisionError
    assert not is_alive(pid) and place.name not in list_namespaces()


@needs_root
def test_a_relay_that_has_died_is_an_error_of_the_next_island():
    with open_links(Links(RTT)) as net:
        if net.relay is None:
            pytest.skip("this kernel has netem")
        os.kill(net.relay.pid, signal.SIGKILL)
        with pytest.raises(ConfigError, match=r"the relay .* has failed"):
            attach(net, RTT)


@needs_root
def test_more_than_the_relay_carries_is_said():
    with open_links(Links(RTT)) as net:
        if net.relay is None:
            pytest.skip("this kernel has netem")
        assert relay_warning(net, Links(AccessLink(1e9, 0.05)), 2) is None
        assert "about 2 Gbit/s in all" in (
            relay_warning(net, Links(AccessLink(1e9, 0.05)), 4) or ""
        )


@needs_root
def test_an_island_of_a_fleet_settles_on_its_own_link(tmp_path: Path):
    links = Links(AccessLink(1e9), {1: AccessLink(4e6)})
    with open_links(links) as net:
        fleet = Fleet(tmp_path, [], net=net, links=links)
        for target in (0, 1):
            assign_namespace(fleet, target)
        slow, fast = fleet.namespaces[1], fleet.namespaces[0]
        assert seconds_to_send(SIZE, slow, fast) > 0.9 * SIZE * 8 / 4e6
        assert seconds_to_send(SIZE, fast, slow) > 0.9 * SIZE * 8 / 4e6, "the way down is as slow"
