"""Islands of the run that train and take part like the honest ones, and lie on the wire.

A habit changes what an island says. It is given the kind of a call, or of a reply (`reply to
vote`), and its fields, and returns the fields to send, or None to keep silent.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import torch

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.train import train
from outer.errors import DeadlineError
from outer.network.endpoints import Endpoint, Handler
from tests.hostile.scene import HONEST
from tests.swarm import Work

Fields = dict[str, Any]
Habit = Callable[[str, Fields], Fields | None]
WRONG = "f" * 64
SCALE = 1e30


def no_votes(kind: str, fields: Fields) -> Fields | None:
    return None if kind == "vote" else fields


def no_receipts(kind: str, fields: Fields) -> Fields | None:
    return None if kind in ("reply to vote", "reply to outcomequery") else fields


def no_plans(kind: str, fields: Fields) -> Fields | None:
    return None if kind == "plan" else fields


def plain_noes(kind: str, fields: Fields) -> Fields | None:
    return fields | {"digest": None, "cause": "disk full"} if kind == "vote" else fields


def accusations(kind: str, fields: Fields) -> Fields | None:
    accused = {
        "digest": None,
        "cause": "nan",
        "accused": HONEST[fields.get("round", 0) % len(HONEST)],
    }
    return fields | accused if kind == "vote" else fields


def always_aborted(kind: str, fields: Fields) -> Fields | None:
    return (
        fields | {"outcome": "abort"}
        if kind in ("reply to vote", "reply to outcomequery")
        else fields
    )


def always_committed(kind: str, fields: Fields) -> Fields | None:
    return (
        fields | {"outcome": "commit"}
        if kind in ("reply to vote", "reply to outcomequery")
        else fields
    )


def noes_and_commits(kind: str, fields: Fields) -> Fields | None:
    """Vote no, so that the others abort, and tell one of them who asks that the plan is
    committed.
    """
    return always_committed(kind, plain_noes(kind, fields) or fields)


def ahead(kind: str, fields: Fields) -> Fields | None:
    """Say that this island is some rounds ahead."""
    if kind not in ("status", "reply to status", "reply to ready"):
        return fields
    return fields | {
        "round": fields["round"] + 2,
        "tokens": fields["tokens"] + (1 << 40),
        "digest": WRONG,
    }


def lies(*habits: Habit) -> Work:
    """The work of an island that joins the run, trains, and has these habits once it has
    entered.
    """

    def live(runtime: Runtime) -> None:
        entered = runtime.outer.begin

        def begin() -> Any:
            position = entered()
            runtime.participation.event_loop.run(_acquire(runtime, habits))
            return position

        runtime.outer.begin = begin
        life.run(runtime)

    return lambda config, index: train(config, index, live)


def sends_nan(config: Config, index: int) -> None:
    """Send payloads of which each bit is set."""
    train(config, index, _lives_with_payloads(lambda payload: torch.full_like(payload, 0xFF)))


def sends_noise(config: Config, index: int) -> None:
    """Send payloads of random bits, so that some of them are finite and huge."""
    train(config, index, _lives_with_payloads(lambda p: torch.randint_like(p, 256)))


def withholds(config: Config, index: int) -> None:
    """Send payloads to all islands but the last of the honest ones, and accuse it of sending
    none.
    """

    def live(runtime: Runtime) -> None:
        transport, leader = runtime.network.transport, runtime.outer.averager.runner.leader  # pyright: ignore[reportAttributeAccessIssue]
        send, decide = transport.send, leader.decide

        async def send_to_some(to: Endpoint, tag: Any, payload: torch.Tensor) -> None:
            if to.island != HONEST[-1]:
                await send(to, tag, payload)

        def accuse(vote: Any, on_sent: Callable[[], None]) -> bool:
            accused = None if vote.digest else HONEST[-1]
            return decide(
                vote.model_copy(update={"accused": accused, "waits_for_means": False}), on_sent
            )

        transport.send, leader.decide = send_to_some, accuse
        life.run(runtime)

    train(config, index, live)


def sends_scaled(config: Config, index: int) -> None:
    """Send a pseudo-gradient times 1e30: every value is finite, and so is a mean with it."""

    def live(runtime: Runtime) -> None:
        payloads = runtime.outer.averager.memory.payloads  # pyright: ignore[reportAttributeAccessIssue]
        encode = payloads.encode
        payloads.encode = lambda part, values: encode(part, values * SCALE)
        life.run(runtime)

    train(config, index, live)


def sends_other_digests(config: Config, index: int) -> None:
    """Find another mean than the others in each round, and vote for it."""

    def live(runtime: Runtime) -> None:
        leader = runtime.outer.averager.runner.leader  # pyright: ignore[reportAttributeAccessIssue]
        decide = leader.decide

        def lie(vote: Any, on_sent: Callable[[], None]) -> bool:
            return decide(vote.model_copy(update={"digest": vote.digest and WRONG}), on_sent)

        leader.decide = lie
        life.run(runtime)

    train(config, index, live)


def sends_long_payloads(config: Config, index: int) -> None:
    """Send frames of payloads that are far longer than anybody waits for."""
    from outer.network.endpoints import Kind
    from outer.network.frames import FrameStream, Header

    write = FrameStream.write

    async def lie(stream: FrameStream, header: Header, payload: memoryview | bytes) -> None:
        await write(stream, header, bytes(1 << 28) if header.kind is Kind.PAYLOAD else payload)

    FrameStream.write = lie
    train(config, index)


def _lives_with_payloads(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Runtime], None]:
    def live(runtime: Runtime) -> None:
        transport = runtime.network.transport
        send = transport.send
        transport.send = lambda to, tag, payload: send(to, tag, change(payload))
        life.run(runtime)

    return live


async def _acquire(runtime: Runtime, habits: tuple[Habit, ...]) -> None:
    """Falsify the calls of the island's leader, and its replies."""
    messenger: Any = runtime.network.messenger
    call, handlers = messenger.call, messenger._handlers

    async def lying_call(
        address: str, kind: str, body: bytes, *, timeout_seconds: float, **options: Any
    ) -> bytes:
        if (body := _falsify(habits, kind, body)) is None:
            await asyncio.sleep(timeout_seconds)
            raise DeadlineError(f"{kind} is not sent")
        return await call(address, kind, body, timeout_seconds=timeout_seconds, **options)

    def lying(kind: str, handler: Handler) -> Handler:
        async def answer(source: Endpoint, body: bytes) -> bytes:
            reply = _falsify(habits, f"reply to {kind}", await handler(source, body))
            return await asyncio.Event().wait() or b"" if reply is None else reply

        return answer

    messenger.call = lying_call
    for kind in ("ready", "status", "plan", "vote", "outcomequery"):
        handlers[kind] = lying(kind, handlers[kind])


def _falsify(habits: tuple[Habit, ...], kind: str, body: bytes) -> bytes | None:
    if not body.startswith(b"{"):
        return body
    fields: Fields | None = json.loads(body)
    for habit in habits:
        fields = None if fields is None else habit(kind, fields)
    return None if fields is None else json.dumps(fields).encode()
