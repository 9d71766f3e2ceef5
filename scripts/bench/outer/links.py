"""Measured round trip and throughput of the links that `--link` makes, and the requested ones.

    .venv/bin/python -m scripts.bench.outer.links [--links 100mbit,rtt=50ms 1gbit] [--islands 2]
        [--connections 1 4]

All islands send to their next neighbour at once, over the given number of TCP connections. `share`
is the throughput of the slowest island's uplink, headers included, over the requested rate;
`payload` is the same for the bytes that TCP delivers. Round trips are of one byte over TCP, with
idle links (median and 95th percentile) and during the transfer. Needs root.
"""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from statistics import median

from diloco.network_emulation.links import Links, attach, count_bytes, open_links, parse_link
from diloco.network_emulation.namespaces import Namespace

PORT = 7001
ECHOES = 100
PAUSE_SECONDS = 0.003
WARM_SECONDS = 2.0
SECONDS = 5.0
GUARD_SECONDS = 60.0
CHUNK = 1 << 18
received_bytes = 0
_LINK = f"{'link':<22}{'connections':>12}{'share':>8}{'payload':>9}"
HEADER = f"{_LINK}{'rtt':>10}{'p95':>10}{'rtt loaded':>12}"


def serve(host: str) -> None:
    """Serve echo and sink connections until stdin closes."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with socket.create_server((host, PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    """Serve one connection by its first byte: `e` echoes, `c` receives and counts, `t` returns the
    count as text.
    """
    global received_bytes
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = connection.recv(1)
        buffer = bytearray(CHUNK)
        if kind == b"t":
            connection.sendall(str(received_bytes).encode())
            return
        while received := connection.recv_into(buffer):
            if kind == b"e":
                connection.sendall(buffer[:received])
            else:
                received_bytes += received


def measure(host: str, connections: int) -> None:
    """Print, in one line, the round trips when idle and when loaded, and the payload per second."""
    idle = round_trips(host, ECHOES)
    for _ in range(connections):
        threading.Thread(target=send, args=(host,), daemon=True).start()
    time.sleep(WARM_SECONDS)
    print("warm", flush=True)
    before = query_received_bytes(host)
    started_at = time.monotonic()
    loaded: list[float] = []
    while time.monotonic() - started_at < SECONDS:
        loaded += round_trips(host, 2)
    rate = (query_received_bytes(host) - before) / (time.monotonic() - started_at)
    print(
        "measured", median(idle), sorted(idle)[-len(idle) // 20], median(loaded), rate, flush=True
    )
    # Keep sending until the other islands have finished measuring.
    sys.stdin.read()


def send(host: str) -> None:
    """Send until the process is killed."""
    chunk = bytes(CHUNK)
    with socket.create_connection((host, PORT), GUARD_SECONDS) as connection:
        connection.sendall(b"c")
        while True:
            connection.sendall(chunk)


def query_received_bytes(host: str) -> int:
    """Return the number of bytes that the server has received so far."""
    with socket.create_connection((host, PORT), GUARD_SECONDS) as connection:
        connection.sendall(b"t")
        return int(connection.recv(CHUNK))


def round_trips(host: str, count: int) -> list[float]:
    """Return the seconds of `count` round trips of one byte.

    A first one, which may resolve addresses, is not counted.
    """
    seconds = []
    with socket.create_connection((host, PORT), GUARD_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"e")
        for _ in range(count + 1):
            started_at = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            seconds.append(time.monotonic() - started_at)
            time.sleep(PAUSE_SECONDS)
    return seconds[1:]


def start_script(place: Namespace, *words: str) -> subprocess.Popen[str]:
    """Start this script in a namespace."""
    command = place.command(sys.executable, "-m", "scripts.bench.outer.links", *words)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_words(process: subprocess.Popen[str]) -> list[str]:
    """Read the next line of the process, split into words."""
    assert process.stdout is not None, "it is a pipe"
    return process.stdout.readline().split()


def measure_link(text: str, num_islands: int, connections: int) -> str:
    """Measure one link in a network of its own and format the row."""
    _, link = parse_link(text)
    processes: list[subprocess.Popen[str]] = []
    try:
        with open_links(Links(link)) as net:
            places = [attach(net, link) for _ in range(num_islands)]
            for place in places:
                processes.append(start_script(place, "--serve", place.host))
                read_words(processes[-1])
            after = [*places[1:], places[0]]
            clients = [
                start_script(place, "--measure", to.host, str(connections))
                for place, to in zip(places, after, strict=True)
            ]
            processes += clients
            for client in clients:
                read_words(client)
            before = [count_bytes(net, place)[0] for place in places]
            began = time.monotonic()
            time.sleep(SECONDS - 0.5)
            up = [count_bytes(net, place)[0] - b for place, b in zip(places, before, strict=True)]
            share = min(up) * 8 / (time.monotonic() - began) / link.rate
            figures = [[float(word) for word in read_words(client)[1:]] for client in clients]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    payload = min(figure[3] for figure in figures) * 8 / link.rate
    rtt, p95, loaded = (median(figure[i] for figure in figures) * 1e3 for i in range(3))
    return (
        f"{text:<22}{connections:>12}{share:>8.3f}{payload:>9.3f}{rtt:>7.2f} ms{p95:>7.2f} "
        f"ms{loaded:>9.1f} ms"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    links = [
        "20mbit",
        "100mbit",
        "1gbit",
        "20mbit,rtt=50ms",
        "100mbit,rtt=20ms",
        "100mbit,rtt=200ms",
        "1gbit,rtt=50ms",
    ]
    parser.add_argument("--links", nargs="+", default=links)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    elif args.measure:
        measure(args.measure[0], int(args.measure[1]))
    else:
        print(HEADER)
        for text in args.links:
            for connections in args.connections:
                print(measure_link(text, args.islands, connections), flush=True)


if __name__ == "__main__":
    main()
