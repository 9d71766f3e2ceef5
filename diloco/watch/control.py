"""What an operator may do from the page with `--control`. Each action must be confirmed, and is
noted in the logbook.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from diloco.config.schema import Config, load_config
from diloco.errors import ConfigError
from diloco.records.logbook import Logbook
from diloco.records.run_folder import island_folders
from diloco.runtime.operator_requests import LISTENER, is_listening
from diloco.status.operator_orders import Action, carry_out
from outer.errors import MessageError, OuterError
from outer.network.endpoints import ISLAND_NAME

CONFIRM_SECONDS = 120.0
OPERATOR = "operator"
"""The name in the logbook for actions from the page."""
TEXTS = {
    "save": "{who} saves a checkpoint now and goes on.",
    "stop": "{who} leaves after its round and does not come back by itself.",
    "exclude": "{where} refuses {island} from now on, until its line is taken out of the file "
    "'banned'.",
}


class Wish(BaseModel):
    """A request from the page. `confirm` is empty in the first request, and the word of its answer
    in the second.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["save", "stop", "exclude", "invite"]
    island: str = Field(default="", pattern=f"^({ISLAND_NAME})?$")
    """The island that is to act; empty for all islands. With action exclude: the island to
    exclude."""
    confirm: str = Field(default="", max_length=64)


class Hand(Protocol):
    """A way to send requests to a run's islands."""

    @property
    def where(self) -> str:
        """Which islands are reached, in words."""
        ...

    @property
    def book(self) -> Logbook:
        """The logbook in which actions are noted."""
        ...

    def act(self, action: Action, island: str) -> str:
        """Carry out the action and return its result as text. Raises OuterError if no island did
        it.
        """
        ...

    def invite(self) -> str:
        """Return the command with which another island joins. Raises OuterError if it is not
        known.
        """
        ...


class Control:
    """Asks for confirmation before it acts. Its methods may be called on any thread."""

    def __init__(self, hand: Hand, operator: str) -> None:
        """Create a control that acts in the name of `operator`, a public key."""
        self._hand = hand
        self.operator = operator
        self._asked: dict[str, tuple[Wish, float]] = {}

    def answer(self, wish: Wish) -> Mapping[str, str]:
        """Return the word that confirms a first request, with a text; after a confirmed request, a
        text with its result.

        Raises OuterError.
        """
        if wish.action == "invite":
            self._note("showed the line with which an island joins")
            return {"text": self._hand.invite()}
        if wish.action == "exclude" and not wish.island:
            raise MessageError("exclude: got no island; choose an island on the page")
        plain = wish.model_copy(update={"confirm": ""})
        if not wish.confirm:
            word = secrets.token_urlsafe(12)
            self._asked = {
                key: value for key, value in self._asked.items() if time.monotonic() < value[1]
            }
            self._asked[word] = plain, time.monotonic() + CONFIRM_SECONDS
            who = wish.island or f"Every island of {self._hand.where}"
            text = TEXTS[wish.action].format(
                who=who, where=f"Every island of {self._hand.where}", island=wish.island
            )
            return {"text": text, "confirm": word}
        asked, until = self._asked.pop(wish.confirm, (None, 0.0))
        if asked != plain or time.monotonic() > until:
            raise MessageError(
                "got a confirmation of a request that was not made, or was made too long ago: ask "
                "again"
            )
        try:
            said = self._hand.act(wish.action, wish.island)
        except OuterError as error:
            self._note(f"{wish.action} {wish.island or 'all'} failed: {error}")
            raise
        self._note(f"{wish.action} {wish.island or 'all'}: {said}")
        return {"text": said}

    def _note(self, text: str) -> None:
        self._hand.book.note("control", f"{self.operator[:16]}: {text}")


@dataclass(frozen=True)
class FolderHand:
    """Acts through files in a run's folder, which the islands of this machine read."""

    run_dir: Path

    @property
    def where(self) -> str:
        return "this machine"

    @property
    def book(self) -> Logbook:
        return Logbook(self.run_dir, OPERATOR)

    def act(self, action: Action, island: str) -> str:
        listening = [folder.name for folder in island_folders(self.run_dir) if listens(folder)]
        if action == "exclude":
            return (
                f"{', '.join(listening) or 'no island'} {carry_out(self.run_dir, action, island)}"
            )
        if not listening or (island and island not in listening):
            raise MessageError(
                f"{island or 'no island'} does not run on this machine: no request was made"
            )
        folder = self.run_dir / island if island else self.run_dir
        return f"{island or ', '.join(listening)} {carry_out(folder, action, '')}"

    def invite(self) -> str:
        return invitation(find_config(self.run_dir), "")


def listens(folder: Path) -> bool:
    """Return whether the island with this folder runs on this machine and takes requests."""
    return (folder / LISTENER).exists() and is_listening(folder / LISTENER)


def find_config(run_dir: Path) -> Config:
    """Return the config in a run's folder or in a folder of its islands. Raises MessageError if
    there is none.
    """
    for path in (run_dir / "config.yaml", *sorted(run_dir.glob("*/config.yaml"))):
        try:
            return load_config(path)
        except ConfigError:
            continue
    raise MessageError(f"{run_dir} has no config.yaml that can be read")


def invitation(config: Config, address: str) -> str:
    """Return the command by which another island joins, with notes on what else its operator must
    do.
    """
    address = address or next(iter(config.island.bootstrap), "")
    if not address:
        raise MessageError(
            "the run's config has no island.bootstrap: give the address that `diloco bootstrap` "
            "printed"
        )
    words = [f"diloco join {address}", f"--run {config.name}"]
    if config.island.run_key_file:
        words.append("island.run_key_file=KEY")
    notes = ["KEY is the file with the run key"] if config.island.run_key_file else []
    if config.island.allow:
        notes.append(
            "its key (`diloco key`) must be in island.allow of all islands before it joins"
        )
    return " ".join(words) + (f"   # {'; '.join(notes)}" if notes else "")
