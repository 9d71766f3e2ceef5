"""Islands that reach nobody when they start: a fresh one gives up at once, one that was in the run
waits.
"""

import asyncio
import logging
from pathlib import Path

import pytest

from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.errors import UnreachableError
from outer.identity.known_names import NAMES_FILE, KnownNames
from outer.membership.rendezvous import serve_rendezvous
from tests.outer.nets import key_of, run


def settings_of(island: str, bootstrap: str, folder: Path) -> NetworkSettings:
    names = folder / NAMES_FILE
    return NetworkSettings(
        "run",
        island,
        0,
        [bootstrap],
        island_key=key_of(island),
        names_path=names,
        connect_seconds=0.3,
    )


def a_dead_address() -> str:
    rendezvous = serve_rendezvous("127.0.0.1", 0)
    rendezvous.close()
    return rendezvous.address


def remember(folder: Path, *islands: str) -> None:
    """Write the names that islands leave in their folder."""
    names = KnownNames(folder / NAMES_FILE)
    for island in islands:
        names.claim(island, key_of(island).public)
    names.save()


@pytest.mark.parametrize("known", [(), ("a",)])
def test_an_island_that_has_met_nobody_gives_up_when_no_address_answers(
    known: tuple[str, ...], tmp_path: Path
) -> None:
    remember(tmp_path, *known)
    with pytest.raises(UnreachableError, match=r"did not answer within 0.3 s"):
        run(open_network("gloo", settings_of("a", a_dead_address(), tmp_path)))


def test_an_island_that_was_in_the_run_waits_until_an_address_answers(
    tmp_path: Path, caplog
) -> None:
    remember(tmp_path, "a", "b")
    address = a_dead_address()
    caplog.set_level(logging.WARNING)

    async def work() -> None:
        opening = asyncio.create_task(open_network("gloo", settings_of("a", address, tmp_path)))
        while "so it retries for 10 more minutes" not in caplog.text:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        rendezvous = serve_rendezvous("127.0.0.1", int(address.rpartition(":")[2]))
        try:
            await (await opening).close()
        finally:
            rendezvous.close()

    run(work())
