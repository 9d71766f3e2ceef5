"""Machines whose clocks are far apart do not see each other in hivemind's DHT, and are told so."""

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("hivemind")

from outer.membership.dht import clocks
from outer.membership.dht.membership import serve_bootstrap
from outer.membership.dht.node import close_dht, open_dht
from outer.transports.hivemind_daemon import DaemonSettings, start_daemon
from tests.outer.nets import run

ROOT = Path(__file__).parents[3]
AWAY = """
import asyncio, sys, time
real = time.time
time.time = lambda: real() + float(sys.argv[2])
from outer.errors import InputError
from outer.membership.dht.membership import find_runs_in_swarm
try:
    print(asyncio.run(find_runs_in_swarm(sys.argv[1], 10.0, None)))
except InputError as error:
    print(error)
"""


def visit(address: str, ahead: float) -> str:
    """What a visitor of the swarm prints whose clock is so many seconds ahead."""
    command = [sys.executable, "-c", AWAY, address, str(ahead)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("ahead", "word"), [(7200.0, "7,200 s ahead of"), (-7200.0, "7,200 s behind"), (1.0, "{}")]
)
def test_who_comes_with_a_wrong_clock_is_told_by_how_much(ahead: float, word: str) -> None:
    async def main() -> None:
        peer = await serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], None)
        try:
            said = await asyncio.to_thread(visit, peer.addresses[0], ahead)
        finally:
            await peer.close()
        assert word in said and ("timedatectl" in said) == (ahead != 1.0)

    run(main())


def test_a_clock_that_goes_wrong_during_a_run_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        peer = await serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], None)
        daemon = await start_daemon(
            DaemonSettings(["/ip4/127.0.0.1/tcp/0"], bootstrap=list(peer.addresses))
        )
        dht, watch = await open_dht(daemon, list(peer.addresses)), clocks.ClockWatch()
        try:
            for ahead in (0.0, 50.0, 60.0, 0.0, -50.0):
                # The clock of this module alone: the peer lives in the same process.
                monkeypatch.setattr(clocks, "get_dht_time", lambda ahead=ahead: time.time() + ahead)
                await watch.look(dht)
                assert bool(watch.trouble) == (ahead != 0.0)
        finally:
            await close_dht(dht)
            await daemon.close()
            await peer.close()

    with caplog.at_level(logging.WARNING, "outer"):
        run(main())
    said = [
        record.getMessage()
        for record in caplog.records
        if "clock of this machine" in record.getMessage()
    ]
    assert ["50 s ahead of" in said[0], "50 s behind" in said[1], len(said)] == [True, True, 2]
