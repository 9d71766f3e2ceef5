"""What an attacker with the run key says: each function is one turn of a speaker, or the work of a
whole process.
"""

import asyncio
import hashlib
import itertools
import secrets
import time
import zlib
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

from diloco.config.schema import Config
from outer.agreement.messages import Goodbye, OutcomeQuery, Plan, Ready, Status, Vote
from outer.errors import OuterError
from outer.identity.access import Access
from outer.membership.records import (
    MAX_CONFIG_BYTES,
    Announcement,
    Publication,
    Records,
    RunQuery,
    sign_record,
)
from outer.membership.tcp import RENDEZVOUS
from outer.network.endpoints import Endpoint, Kind, Messenger, Traffic
from outer.network.frames import Header
from outer.network.handshake import say_hello
from outer.network.messages import Message, parse
from outer.network.rpc import MAX_CALL_BYTES, StreamMessenger
from outer.routes.dialer import dial
from outer.transfer.donor import PartRequest
from tests.hostile.scene import HONEST, note_begin, targets
from tests.hostile.speakers import CALL_SECONDS, Speaker, fresh, speaker

MANY_TOKENS = 1 << 61


async def says_goodbye_for_others(speaker: Speaker) -> None:
    """One goodbye, status and no for each honest island, under a name of its own."""
    victims = await speaker.victims()
    for name, member in victims.items():
        for message in _said_for(name, member.incarnation, speaker.readies):
            await speaker.tell_all(message)


def speaks_as_others(config: Config, index: int) -> None:
    """Open the network in each honest island's name, with another key, and speak."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            thieves = [await stack.enter_async_context(speaker(config, name)) for name in HONEST]
            note_begin(config)
            while True:
                for thief in thieves:
                    for message in _said_for(thief.name, thief.incarnation, thief.readies):
                        for name, address in targets(config).items():
                            if name != thief.name:
                                await _call(thief, address, message)
                await asyncio.sleep(0.2)

    asyncio.run(main())


def _said_for(name: str, incarnation: str, readies: Mapping[str, Ready]) -> list[Message]:
    said: list[Message] = [Goodbye(island=name, incarnation=incarnation, round=0, steps=0)]
    for ready in readies.values():
        plan = Plan(round=ready.round, attempt=ready.attempt, planner=name, participants=[ready])
        said += [plan, Vote.no(plan, name, "nothing"), ready.model_copy(update={"island": name})]
    return said


async def is_a_ghost(speaker: Speaker) -> None:
    """Be ready for each round, and do nothing in it."""
    await _announce(speaker)
    ready = speaker.ready(await speaker.hear(), tokens=1, weight=1)
    await speaker.tell_all(ready)


async def accuses_as_a_ghost(speaker: Speaker) -> None:
    """Vote no on the plan that the honest ones make, and accuse each of them."""
    await _announce(speaker)
    await speaker.hear()
    newest = [
        r
        for r in speaker.readies.values()
        if r.round == max(r.round for r in speaker.readies.values())
    ]
    plan = Plan(
        round=newest[0].round,
        attempt=newest[0].attempt,
        planner=min(HONEST),
        participants=sorted(newest, key=lambda ready: ready.island),
    )
    for accused in HONEST:
        await speaker.tell_all(Vote.no(plan, speaker.name, "nan", accused))
    await speaker.tell_all(OutcomeQuery(plan=plan.id, round=plan.round))
    await speaker.tell_all(speaker.ready(newest[0], tokens=1, weight=1))


async def claims_many_tokens(speaker: Speaker) -> None:
    """Claim to be ahead by 2^61 tokens, in its record and to everybody."""
    await _announce(speaker, round=speaker_round(speaker) + 3, tokens=MANY_TOKENS)
    claim = Status(
        round=speaker_round(speaker) + 3, tokens=MANY_TOKENS, digest=secrets.token_hex(32)
    )
    await speaker.tell_all(claim)


async def overstates_its_tokens(speaker: Speaker) -> None:
    """Be ready with more tokens than a round can have, and with far more than the others."""
    await _announce(speaker)
    ready = await speaker.hear()
    for tokens in ((1 << 53) - 1, 100 * max(ready.tokens, 1)):
        await speaker.tell_all(speaker.ready(ready, tokens=tokens, weight=tokens))


def comes_and_goes(config: Config, index: int) -> None:
    """Come under a new name and key, be ready, and leave, again and again."""

    async def main() -> None:
        while True:
            async with speaker(config, fresh("tramp")) as tramp:
                note_begin(config)
                await is_a_ghost(tramp)
                goodbye = Goodbye(
                    island=tramp.name, incarnation=tramp.incarnation, round=0, steps=0
                )
                await tramp.tell_all(goodbye)

    asyncio.run(main())


def replays_records(config: Config, index: int) -> None:
    """Store what the islands have published before, again and again."""

    async def main() -> None:
        async with speaker(config, fresh("replayer")) as thief:
            note_begin(config)
            replay = (
                _replay_in_the_dht
                if config.outer.transport == "hivemind"
                else _replay_at_the_rendezvous
            )
            await replay(config, thief)

    asyncio.run(main())


async def _replay_at_the_rendezvous(config: Config, thief: Speaker) -> None:
    messenger, target = (
        rendezvous_messenger(thief),
        config.island.bootstrap[0].removeprefix("tcp://"),
    )
    seen: list[Records] = []
    while True:
        query = RunQuery(run=config.name).encode()
        seen.append(
            parse(
                Records,
                await messenger.call(target, "members", query, timeout_seconds=CALL_SECONDS),
            )
        )
        for record in itertools.chain.from_iterable(
            records.records.values() for records in seen[-20:]
        ):
            body = Announcement(run=config.name, record=record, life_seconds=60).encode()
            for kind in ("announce", "beat"):
                with suppress(OuterError):
                    await messenger.call(target, kind, body, timeout_seconds=CALL_SECONDS)
        await asyncio.sleep(0.5)


async def _replay_in_the_dht(config: Config, thief: Speaker) -> None:
    from hivemind.dht.node import DHTID
    from hivemind.utils.serializer import MSGPackSerializer
    from hivemind.utils.timed_storage import get_dht_time

    dht = thief.membership._dht  # pyright: ignore[reportAttributeAccessIssue]
    dht.protocol.record_validator = None  # what is stored and read keeps its signature
    key, seen = DHTID.generate(f"{config.name}/members"), []
    while True:
        peers = await dht.find_nearest_nodes([key], exclude_self=True)
        for node, peer in peers[key].items():
            answers = await dht.protocol.call_find(peer, [key]) or {}
            value = answers.get(key, (None,))[0]
            for subkey, entry in (
                value.value.items() if value is not None and hasattr(value.value, "items") else []
            ):
                seen.append((MSGPackSerializer.dumps(subkey), entry.value, value.expiration_time))
            for subkey, stored, _ in seen[-40:]:
                for expires_at in (get_dht_time() + 60, get_dht_time() + 200):
                    await dht.protocol.call_store(
                        peer, [key], [stored], [expires_at], subkeys=[subkey]
                    )
            assert node
        await asyncio.sleep(0.5)


async def sends_long_calls(speaker: Speaker) -> None:
    """As many calls as are taken, each as long as is allowed."""
    body = bytes(MAX_CALL_BYTES - 64)

    async def call(address: str) -> None:
        with suppress(OuterError):
            await speaker.network.messenger.call(
                address, "ready", body, timeout_seconds=CALL_SECONDS
            )

    addresses = [member.control_addresses[0] for member in (await speaker.victims()).values()]
    await asyncio.gather(*(call(address) for address in addresses for _ in range(8)))


async def sends_wrong_items(speaker: Speaker) -> None:
    """Messages of as many wrong items and unknown fields as fit, plain and compressed, to all that
    read messages.
    """
    items = b"[" + b",".join([b"[]"] * 100_000) + b"]"
    fields = b",".join(b'"u%d":1' % number for number in range(200_000))
    bodies = {"ready": b'{"carriers":' + items + b"}", "status": b"{" + fields + b"}"}
    bodies["plan"] = zlib.compress(b'{"participants":[' + b",".join([bodies["ready"]] * 16) + b"]}")

    async def call(messenger: Messenger, address: str, kind: str, body: bytes) -> None:
        with suppress(OuterError):
            await messenger.call(address, kind, body, timeout_seconds=CALL_SECONDS)

    for member in (await speaker.victims()).values():
        for kind, body in bodies.items():
            await call(speaker.network.messenger, member.control_addresses[0], kind, body)
    for link in getattr(speaker.membership, "_links", ()):
        await call(rendezvous_messenger(speaker), link.target, "members", bodies["status"])


def sends_wrong_items_under_new_keys(config: Config, index: int) -> None:
    """The same, under a new name and key each time, because a key is suspended after few."""

    async def main() -> None:
        while True:
            async with speaker(config, fresh("wrong")) as wrong:
                note_begin(config)
                await sends_wrong_items(wrong)

    asyncio.run(main())


async def asks_and_does_not_read(speaker: Speaker) -> None:
    """Ask for parts of the state on many connections, and read none of the replies."""
    messenger = speaker.network.messenger
    assert isinstance(messenger, StreamMessenger)
    for member in (await speaker.victims()).values():
        for _ in range(8):
            with suppress(OuterError, OSError):
                stream = messenger._stream(*await messenger._dial(member.control_addresses[0]), "")
                await say_hello(stream, Endpoint(speaker.name, 0), messenger.auth)
                for number in range(1, 2000):
                    body = PartRequest(part=number % 16, worker=0).encode()
                    await stream.write(Header(Kind.CALL, request=number), b"\4part" + body)


async def floods_the_rendezvous(speaker: Speaker) -> None:
    """Announce islands of many runs, each with as long a record and config as is taken."""
    messenger, addresses = rendezvous_messenger(speaker), speaker.membership._links  # pyright: ignore
    like = next(iter((await speaker.victims()).values()))
    long = speaker.record(like, control_addresses=[secrets.token_hex(120) for _ in range(4000)])
    for number in range(64):
        run = f"flood-{number}"
        record = sign_record(speaker.key, run, long, int(time.time() * 1000))
        said = {
            "publish": Publication(run=run, text="#" * MAX_CONFIG_BYTES),
            "announce": Announcement(run=run, record=record, life_seconds=60),
        }
        for kind, message in said.items():
            with suppress(OuterError):
                await messenger.call(
                    addresses[0].target, kind, message.encode(), timeout_seconds=CALL_SECONDS
                )


def rendezvous_messenger(speaker: Speaker) -> StreamMessenger:
    own = speaker.network.messenger
    assert isinstance(own, StreamMessenger)
    auth = replace(own.auth, names=None, access=Access())
    return StreamMessenger(RENDEZVOUS, Endpoint(speaker.name, 0), dial, Traffic(), auth)


def speaker_round(speaker: Speaker) -> int:
    """The newest round that the speaker has heard of."""
    known = [*speaker.readies.values(), *speaker.statuses.values()]
    return max((message.round for message in known), default=0)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def _announce(speaker: Speaker, **changes: int) -> None:
    """Be in the records of the run, so that the honest ones speak to this name."""
    like = next(iter((await speaker.victims()).values()))
    await speaker.membership.announce(speaker.record(like, **changes))


async def _call(thief: Speaker, address: str, message: Message) -> None:
    kind = type(message).__name__.lower()
    with suppress(OuterError):
        await thief.network.messenger.call(
            address, kind, message.encode(), timeout_seconds=CALL_SECONDS
        )
