"""Bootstrap processes that are shared by the tests of a module."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.bootstraps import bootstrap


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Function from a transport to its bootstrap address, "" for gloo and tls, whose rendezvous
    `swarm` serves.
    """
    known: dict[str, str] = {"gloo": "", "tls": ""}
    with ExitStack() as served:

        def address(transport: str) -> str:
            if transport not in known:
                import hivemind  # noqa: F401 - the forked islands inherit it

                folder: Path = tmp_path_factory.mktemp("bootstrap")
                known[transport] = served.enter_context(bootstrap(transport, folder)).address
            return known[transport]

        yield address
