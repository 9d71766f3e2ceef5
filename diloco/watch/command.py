"""`diloco watch`: find what is to be shown, and show it as a page, as text or as JSON."""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from diloco.errors import ConfigError
from diloco.network_emulation.links import AccessLink, parse_link
from diloco.overview.since import parse_since
from diloco.swarm.visit import host_of
from diloco.watch.control import Control, FolderHand
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView
from inner.files import make_folder
from outer.identity.island_key import IslandKey, load_island_key

How = Literal["page", "text", "json"]


@dataclass(frozen=True)
class Watched:
    """What the user wants to see: one run, or two in their folders."""

    target: str
    more: Sequence[str]
    """The folder of a second run; or, with an address, overrides for the visiting island."""
    run_name: str | None
    keep: Path | None
    key: Path | None = None
    """File with an operator's key, which allows the page to act on the run."""
    link: str | None = None
    """An island's link for the prediction, in the form of `simulate --link`."""
    since: str | None = None
    """Time from which on text and JSON tell incidents, as `parse_since` reads it."""

    @property
    def is_address(self) -> bool:
        return host_of(self.target) is not None and not Path(self.target).is_dir()


def watch(watched: Watched, how: How, host: str, port: int) -> None:
    """Show the runs until Ctrl-C, or print them once. Raises ConfigError, InputError or OuterError
    if that is impossible.
    """
    since = 0.0 if watched.since is None else parse_since(watched.since, time.time())
    with open_views(watched) as (views, control):
        for view in views:
            view.since = since
        if how == "json":
            for view in views:
                view.read()
            states = [RunPrediction(view).state() for view in views]
            typer.echo(
                json.dumps(states[0] if len(states) == 1 else states, indent=2, allow_nan=False)
            )
        elif how == "text":
            from diloco.watch.terminal import show_text

            show_text(views)
        else:
            from diloco.watch.server import serve

            serve(views, host, port, lambda url: typer.echo(f"{url}  (stop with Ctrl-C)"), control)


@contextmanager
def open_views(watched: Watched) -> Iterator[tuple[list[RunView], Control | None]]:
    """Yield the views of the runs, and the control of a run if the page may act on it.

    The records of a run at an address are collected into a folder while the block lasts.
    """
    check(watched)
    link = None if watched.link is None else parse_shared_link(watched.link)
    key = None if watched.key is None else load_operator_key(watched.key)
    if not watched.is_address:
        views = [RunView(Path(each), link) for each in (watched.target, *watched.more)]
        yield views, None if key is None else Control(FolderHand(Path(watched.target)), key.public)
        return
    from diloco.watch.collection.collector import Collector
    from diloco.watch.swarm_hand import SwarmHand

    with ExitStack() as stack:
        folder = watched.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-watch-"))
        )
        collector = Collector(watched.target, watched.more, watched.run_name, folder)
        stack.callback(collector.close)
        view = RunView(collector.start(), link)
        yield [view], None if key is None else Control(SwarmHand(collector, key), key.public)


def parse_shared_link(text: str) -> AccessLink:
    """Return the link that all islands have. Raises ConfigError."""
    island, link = parse_link(text)
    if island is not None:
        raise ConfigError(
            f"--link {text}: got a link of island {island}; allowed: one for all islands, the "
            "slowest of them"
        )
    return link


def load_operator_key(path: Path) -> IslandKey:
    """Read the operator's key, or create it, and print its public half."""
    is_new = not path.exists()
    make_folder(path.parent, "--control")
    key = load_island_key(path)
    made = (
        ", made now: islands that are to obey it over the network list it in island.operators"
        if is_new
        else ""
    )
    typer.echo(f"operator {key.public}{made}")
    return key


def check(watched: Watched) -> None:
    """Raise ConfigError for arguments and options that do not go together."""
    if watched.is_address:
        return
    for option, value in (("--run", watched.run_name), ("--keep", watched.keep)):
        if value is not None:
            raise ConfigError(
                f"got {option} {value}, which is for an address; {watched.target!r} is a folder: "
                "leave it out"
            )
    if setting := next((word for word in watched.more if "=" in word), None):
        raise ConfigError(
            f"got {setting}, which is for an address; {watched.target!r} is a folder: leave it out"
        )
    if watched.key is not None and watched.more:
        raise ConfigError("got --control with two runs; watch only one run to act on it")
    if len(watched.more) > 1:
        raise ConfigError(
            f"got {1 + len(watched.more)} folders; allowed: at most two, which are shown side by "
            "side"
        )
