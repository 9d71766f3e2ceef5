"""What an operator may do from the page with `--control`. Each action is asked twice, and noted in the logbook."""

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
from diloco.status.orders import Action, carry_out
from outer.errors import MessageError, OuterError
from outer.network.endpoints import ISLAND_NAME

CONFIRM_SECONDS = 120.0
OPERATOR = "operator"
"""The name in the logbook under which actions from the page stand."""
TEXTS = {
    "save": "{who} saves a checkpoint now and goes on.",
    "stop": "{who} leaves after its round and does not come back by itself.",
    "exclude": "{where} refuses {island} from now on, until its line is taken out of the file 'banned'.",
}


class Wish(BaseModel):
    """What the page asks for. `confirm` is what the answer to the first time has said, and empty the first time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["save", "stop", "exclude", "invite"]
    island: str = Field(default="", pattern=f"^({ISLAND_NAME})?$")
    """Whom it is about; empty for all islands. exclude: who is excluded."""
    confirm: str = Field(default="", max_length=64)


class Hand(Protocol):
    """The way to a run's islands."""

    @property
    def where(self) -> str:
        """Which islands it reaches, in words."""
        ...

    @property
    def book(self) -> Logbook:
        """Where actions are noted."""
        ...

    def act(self, action: Action, island: str) -> str:
        """Do it, and say what came of it. Raises OuterError if nothing did."""
        ...

    def invite(self) -> str:
        """The command with which another island joins. Raises OuterError if it is not known."""
        ...


class Control:
    """Asks again before it acts. Its methods may be called on any thread."""

    def __init__(self, hand: Hand, operator: str) -> None:
        """`operator`: the public key in whose name everything is done."""
        self._hand, self.operator = hand, operator
        self._asked: dict[str, tuple[Wish, float]] = {}

    def answer(self, wish: Wish) -> Mapping[str, str]:
        """Either a text with the word that confirms it, or the text of what has been done. Raises OuterError."""
        if wish.action == "invite":
            self._note("showed the line with which an island joins")
            return {"text": self._hand.invite()}
        if wish.action == "exclude" and not wish.island:
            raise MessageError("exclude: choose an island")
        plain = wish.model_copy(update={"confirm": ""})
        if not wish.confirm:
            word = secrets.token_urlsafe(12)
            self._asked = {key: value for key, value in self._asked.items() if time.monotonic() < value[1]}
            self._asked[word] = plain, time.monotonic() + CONFIRM_SECONDS
            who = wish.island or f"Every island of {self._hand.where}"
            text = TEXTS[wish.action].format(who=who, where=f"Every island of {self._hand.where}", island=wish.island)
            return {"text": text, "confirm": word}
        asked, until = self._asked.pop(wish.confirm, (None, 0.0))
        if asked != plain or time.monotonic() > until:
            raise MessageError("this was not asked before, or too long ago: ask again")
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
    """Acts by the files that islands of this machine read in a run's folder."""

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
            return f"{', '.join(listening) or 'no island'} {carry_out(self.run_dir, action, island)}"
        if not listening or (island and island not in listening):
            raise MessageError(f"{island or 'no island'} does not run on this machine: no request was made")
        folder = self.run_dir / island if island else self.run_dir
        return f"{island or ', '.join(listening)} {carry_out(folder, action, '')}"

    def invite(self) -> str:
        return invitation(find_config(self.run_dir), "")


def listens(folder: Path) -> bool:
    """Whether the island with this folder runs on this machine and takes requests."""
    return (folder / LISTENER).exists() and is_listening(folder / LISTENER)


def find_config(run_dir: Path) -> Config:
    """The config in a run's folder or in that of one of its islands. Raises MessageError if there is none."""
    for path in (run_dir / "config.yaml", *sorted(run_dir.glob("*/config.yaml"))):
        try:
            return load_config(path)
        except ConfigError:
            continue
    raise MessageError(f"{run_dir} has no config.yaml that can be read")


def invitation(config: Config, address: str) -> str:
    """The command by which another island joins, with what its operator must know besides."""
    address = address or next(iter(config.island.bootstrap), "")
    if not address:
        raise MessageError("the run's config names no address (island.bootstrap): give the one of `diloco bootstrap`")
    words = [f"diloco join {address}", f"--run {config.name}"]
    if config.island.run_key_file:
        words.append("island.run_key_file=KEY")
    notes = ["KEY is the file with the run key"] if config.island.run_key_file else []
    if config.island.allow:
        notes.append("its key (`diloco key`) must be in island.allow of all islands before")
    return " ".join(words) + (f"   # {'; '.join(notes)}" if notes else "")
