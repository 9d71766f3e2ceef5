"""What `--link` makes of a link: round trip and throughput between namespaces, against what was asked for.

.venv/bin/python -m scripts.bench.links [--links 100mbit,rtt=50ms 1gbit] [--islands 2] [--connections 1 4]

Every island sends to the next one at once, by so many TCP connections. `share` is what the slowest island's link has
carried up, headers included, over the rate; `payload` the same of what TCP delivered. The round trip is of one byte
over TCP, first with idle links (median and 95th percentile), then in the middle of the transfer. Needs root.
"""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from statistics import median

from diloco.links import Links, carried, connect, opened_links, parse_link
from diloco.netns import Namespace

PORT = 7001
ECHOES = 100
PAUSE_SECONDS = 0.003
WARM_SECONDS, SECONDS = 2.0, 5.0
GUARD_SECONDS = 60.0
CHUNK = 1 << 18
taken = 0
HEADER = f"{'link':<22}{'connections':>12}{'share':>8}{'payload':>9}{'rtt':>10}{'p95':>10}{'rtt loaded':>12}"


def serve(host: str) -> None:
    """A peer: sends back what comes byte by byte, and counts what comes in chunks; ends with stdin."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with socket.create_server((host, PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    """What it has taken so far, as text, after a `t`; an echo of every byte after an `e`; after a `c` it takes all."""
    global taken
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind, buffer = connection.recv(1), bytearray(CHUNK)
        if kind == b"t":
            connection.sendall(str(taken).encode())
            return
        while received := connection.recv_into(buffer):
            if kind == b"e":
                connection.sendall(buffer[:received])
            else:
                taken += received


def measure(host: str, connections: int) -> None:
    """Print the round trips when idle, payload a second, and the round trips while sending, all in one line."""
    idle = round_trips(host, ECHOES)
    for _ in range(connections):
        threading.Thread(target=send, args=(host,), daemon=True).start()
    time.sleep(WARM_SECONDS)
    print("warm", flush=True)
    before, started_at = taken_by(host), time.monotonic()
    loaded: list[float] = []
    while time.monotonic() - started_at < SECONDS:
        loaded += round_trips(host, 2)
    rate = (taken_by(host) - before) / (time.monotonic() - started_at)
    print("measured", median(idle), sorted(idle)[-len(idle) // 20], median(loaded), rate, flush=True)
    sys.stdin.read()  # goes on sending until the others have measured, too


def send(host: str) -> None:
    """Send for good."""
    chunk = bytes(CHUNK)
    with socket.create_connection((host, PORT), GUARD_SECONDS) as connection:
        connection.sendall(b"c")
        while True:
            connection.sendall(chunk)


def taken_by(host: str) -> int:
    """Bytes that the peer has been sent by now."""
    with socket.create_connection((host, PORT), GUARD_SECONDS) as connection:
        connection.sendall(b"t")
        return int(connection.recv(CHUNK))


def round_trips(host: str, count: int) -> list[float]:
    """Seconds that a byte takes there and back; the first, which may look up addresses, is left out."""
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


def started(place: Namespace, *words: str) -> subprocess.Popen[str]:
    """This script, in a namespace."""
    command = place.command(sys.executable, "-m", "scripts.bench.links", *words)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def heard(process: subprocess.Popen[str]) -> list[str]:
    """The words of the next line it prints."""
    assert process.stdout is not None, "it is a pipe"
    return process.stdout.readline().split()


def line(text: str, num_islands: int, connections: int) -> str:
    """One row: a net made, measured and removed."""
    _, link = parse_link(text)
    processes: list[subprocess.Popen[str]] = []
    try:
        with opened_links(Links(link)) as net:
            places = [connect(net, link) for _ in range(num_islands)]
            for place in places:
                processes.append(started(place, "--serve", place.host))
                heard(processes[-1])
            after = [*places[1:], places[0]]
            clients = [
                started(place, "--measure", to.host, str(connections)) for place, to in zip(places, after, strict=True)
            ]
            processes += clients
            for client in clients:
                heard(client)
            before, began = [carried(net, place)[0] for place in places], time.monotonic()
            time.sleep(SECONDS - 0.5)
            up = [carried(net, place)[0] - b for place, b in zip(places, before, strict=True)]
            share = min(up) * 8 / (time.monotonic() - began) / link.rate
            figures = [[float(word) for word in heard(client)[1:]] for client in clients]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    payload = min(figure[3] for figure in figures) * 8 / link.rate
    rtt, p95, loaded = (median(figure[i] for figure in figures) * 1e3 for i in range(3))
    return f"{text:<22}{connections:>12}{share:>8.3f}{payload:>9.3f}{rtt:>7.2f} ms{p95:>7.2f} ms{loaded:>9.1f} ms"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    links = ["20mbit", "100mbit", "1gbit", "20mbit,rtt=50ms", "100mbit,rtt=20ms", "100mbit,rtt=200ms", "1gbit,rtt=50ms"]
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
                print(line(text, args.islands, connections), flush=True)


if __name__ == "__main__":
    main()
