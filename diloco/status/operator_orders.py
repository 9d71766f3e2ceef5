"""Orders of an operator to an island over the network, and the server that obeys them.

    call           body    reply
    island_order   Order   Carried

The server runs on rank 0. An order is signed with a key that the island's operator has listed in
`island.operators`. Others are refused. An order does the same as a file in the island's folder:
save, stop after a round, or refuse another island.
"""

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from pydantic import Field

from diloco.runtime.operator_requests import SAVE, STOP
from outer.errors import MessageError
from outer.identity.access import BANNED_FILE
from outer.identity.island_key import IslandKey, PublicKey, Signature, verify
from outer.network.endpoints import Endpoint, Messenger
from outer.network.messages import IslandName, Message, RunName, parse, receive

log = logging.getLogger(__name__)

CALL = "island_order"
FRESH_MS = 60_000
"""Orders older than this, or as far in the future, are refused: they may be replayed."""
Action = Literal["save", "stop", "exclude"]


class OrderText(Message):
    """The signed text. It names the run and the island, so that the order is valid nowhere else."""

    run: RunName
    island: IslandName
    action: Action
    argument: str = Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")
    """stop: the number of rounds after which to stop, or empty for the round under way. exclude: a
    name or a key.
    """
    time: int = Field(ge=0, lt=1 << 53)
    """Milliseconds since 1970 on the operator's clock.

    Each order must be later than the one before.
    """


class Order(Message):
    """Body of the call."""

    text: str = Field(max_length=1000)
    """An OrderText as JSON."""
    operator: PublicKey
    signature: Signature


class Carried(Message):
    """The reply to an order that is carried out."""

    text: str = Field(max_length=300)


def sign_order(text: OrderText, key: IslandKey) -> Order:
    """Return the order, signed with an operator's key."""
    body = text.model_dump_json()
    return Order(
        text=body, operator=key.public, signature=key.sign(purpose(text.run), body.encode()).hex()
    )


def purpose(run: str) -> str:
    """Return what an operator's signature is for: an order in the run with this name."""
    return f"order {run}"


class OrderServer:
    """Carries out the orders of listed operators to one island."""

    def __init__(
        self, run: str, folder: Path, operators: Collection[str], note: Callable[[str, str], None]
    ) -> None:
        """`folder` is the island's and has its name.

        `note` records each order by its name and text.
        """
        self._run = run
        self._folder = folder
        self._operators = operators
        self._note = note
        self._newest: dict[str, int] = {}

    def serve(self, messenger: Messenger) -> None:
        """Answer the calls of operators from now on."""
        messenger.serve(CALL, self._on_order)

    async def _on_order(self, source: Endpoint, body: bytes) -> bytes:
        return Carried(text=self.carry_out(await receive(Order, body), time.time())).encode()

    def carry_out(self, order: Order, now: float) -> str:
        """Check the order at unix time `now`, carry it out, and return what follows.

        Raises MessageError.
        """
        text = self._check(order, round(1000 * now))
        self._newest[order.operator] = text.time
        said = carry_out(self._folder, text.action, text.argument)
        self._note("ordered", f"{order.operator[:16]}: {text.action} {text.argument}".rstrip())
        return said

    def _check(self, order: Order, now_ms: int) -> OrderText:
        if order.operator not in self._operators:
            raise MessageError(
                f"{order.operator[:16]} is no operator of this island (island.operators)"
            )
        if not verify(
            order.operator, purpose(self._run), order.text.encode(), bytes.fromhex(order.signature)
        ):
            raise MessageError("the order's signature is wrong")
        text = parse(OrderText, order.text)
        if (text.run, text.island) != (self._run, self._folder.name):
            raise MessageError(f"the order is for {text.island} of run {text.run}")
        if abs(now_ms - text.time) > FRESH_MS:
            raise MessageError(
                f"the order's time differs by {abs(now_ms - text.time) // 1000} s from this clock's"
            )
        if text.time <= self._newest.get(order.operator, 0):
            raise MessageError("the order is not newer than the last one that was carried out")
        return text


def carry_out(folder: Path, action: Action, argument: str) -> str:
    """Make the request in an island's or a run's folder, and return what follows.

    Raises MessageError if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if action == "save":
            (folder / SAVE).touch()
            return "saves after the inner step under way"
        if action == "stop":
            if argument and not argument.isdecimal():
                raise MessageError(f"stop: got {argument!r}; allowed: a number of rounds")
            (folder / STOP).write_text(argument)
            return (
                f"leaves after {argument} rounds"
                if argument
                else "leaves after the round under way"
            )
        if not argument:
            raise MessageError("exclude: an island's name or key is missing")
        with (folder / BANNED_FILE).open("a") as file:
            file.write(
                f"{argument}  # by an operator, "
                f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())}\n"
            )
        return f"refuses {argument} from now on"
    except OSError as error:
        raise MessageError(f"{action}: {error.strerror}: {error.filename}") from None
