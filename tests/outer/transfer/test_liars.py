"""A joiner names donors that lie or cannot be donors, and a donor refuses requests that make no
sense.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from outer.errors import MessageError, TransportError
from outer.network.endpoints import Endpoint, Messenger
from outer.state.part_state import Position
from outer.transfer.donor import PartRequest
from tests.outer.donors import (
    NUM_PARTS,
    Island,
    Run,
    Watched,
    cache_in,
    enter_state,
    files,
    values,
    with_run,
)


def packed(
    index: int, *, num_rounds: int = 1, tokens: int = 10, spoil: float | None = None, cut: int = 0
) -> bytes:
    """A reply with a part as a donor would send it, apart from the requested faults."""
    body = values(0)[index].clone()
    if spoil is not None:
        body[-1] = spoil
    header = Position(round=num_rounds, tokens=tokens).model_dump_json(exclude={"ledger"}).encode()
    raw = b"part\n" + header + b"\n" + body.numpy().tobytes() + bytes(4 * body.numel())
    return raw[: len(raw) - cut]


LIES = {
    "a part cut short": (lambda i: packed(i, cut=4), "bytes, expected"),
    "a part with nan": (lambda i: packed(i, spoil=float("nan")), "non-finite"),
    "a part of round 0": (lambda i: packed(i, num_rounds=0), "of round 0, asked for 1"),
    "a part of a round far ahead": (
        lambda i: packed(i, num_rounds=1000),
        "of round 1000, but is in round 1",
    ),
    "a part of another history": (lambda i: packed(i, tokens=11), "another history"),
    "a part without position": (lambda i: b"part\n" + packed(i)[40:], "state"),
    "a mean in place of a part": (lambda i: b"mean\n" + bytes(4096), "answers b'mean'"),
    "gone in place of a part": (lambda i: b"gone\n", "answers b'gone'"),
    "nothing": (lambda i: b"", "answers b''"),
    "noise": (lambda i: os.urandom(5000), "answers"),
}


async def enter_liar(here: Run, lie: Callable[[int], bytes]) -> Island:
    island = await here.enter("liar")

    async def answer(source: Endpoint, body: bytes) -> bytes:
        return lie(PartRequest.model_validate_json(body).part)

    island.messengers[0].serve("part", answer)
    return island


@pytest.mark.parametrize("kind", LIES)
def test_a_donor_that_sends_nonsense_is_named(kind: str) -> None:
    lie, text = LIES[kind]

    async def test(here: Run, messenger: Messenger) -> None:
        await enter_liar(here, lie)
        here.commit()
        with pytest.raises(TransportError, match=f"liar: .*{text}"):
            await here.download(messenger).run(1)

    with_run(test)


@pytest.mark.parametrize("kind", ["a part with nan", "a part of a round far ahead", "noise"])
def test_an_honest_donor_makes_good_for_one_that_lies(kind: str) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await enter_liar(here, LIES[kind][0])
        island = await here.enter("honest")
        here.commit()
        download = here.download(messenger)
        await enter_state(here, download)
        assert download.digests() == island.digests

    with_run(test)


def test_a_mean_that_is_malformed_is_refused() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        download = here.download(messenger)
        await download.run(1)
        here.commit()

        async def answer(source: Endpoint, body: bytes) -> bytes:
            return b"mean\n" + b"\1\0" + bytes(7)

        island.messengers[0].serve("mean", answer)
        with pytest.raises(TransportError, match="a: bf16 payload of 7 bytes"):
            await download.catch_up(2)

    with_run(test)


def test_bytes_that_are_sound_but_wrong_fail_the_digest_and_are_forgotten(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await enter_liar(here, packed)
        here.commit()
        download = here.download(messenger, cache=cache_in(tmp_path / "parts"))
        with pytest.raises(MessageError, match="not the state of round 1: liar reports"):
            await enter_state(here, download)
        download.discard()
        assert not download.parts and not files(tmp_path)

    with_run(test)


def test_a_fresh_island_is_no_donor() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        island.describe()
        with pytest.raises(TransportError, match=r"a: .*cannot be a donor"):
            await here.download(messenger).run(0)
        body = PartRequest(part=0).model_dump_json().encode()
        with pytest.raises(MessageError, match="cannot be a donor"):
            await messenger.call(island.messengers[0].address, "part", body, timeout_seconds=5)

    with_run(test)


@pytest.mark.parametrize("carriers", [[0] * (NUM_PARTS - 1), [1] * NUM_PARTS])
def test_a_donor_that_does_not_cover_the_model_is_refused(carriers: list[int]) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.describe(carriers=carriers)
        with pytest.raises(TransportError, match="sends a wrong description of its state"):
            await here.download(messenger).run(1)

    with_run(test)


def test_a_donor_that_has_not_come_to_the_round_is_waited_for() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        watched = Watched(messenger, lambda number: here.commit() if number == 10 else None)
        assert await here.download(watched).run(2) == 2
        assert island.states[0].position.round == 2

    with_run(test)


@pytest.mark.parametrize(
    "body", [b"", b"x", b"1", b'{"part":1e999}', b'{"part":"1"}', b'{"part":-1}', b"[" * 100_000]
)
def test_a_donor_refuses_requests_that_name_no_part(body: bytes) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        with pytest.raises(
            MessageError, match=r"not a PartRequest|not carried|cut off|are allowed"
        ):
            await messenger.call(island.messengers[0].address, "part", body, timeout_seconds=5)

    with_run(test)


@pytest.mark.parametrize(("part", "at_least"), [(NUM_PARTS, 0), (0, 9)])
def test_a_request_that_is_given_nothing_takes_no_place(part: int, at_least: int) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()

        async def ask(**fields: int) -> bytes:
            body = PartRequest(**fields).model_dump_json().encode()
            return await messenger.call(
                island.messengers[0].address, "part", body, timeout_seconds=5
            )

        for worker in range(6):
            with suppress(MessageError):
                assert await ask(part=part, at_least=at_least, worker=worker) == b"behind\n"
        assert (await ask(part=0, worker=6)).startswith(b"part\n")

    with_run(test)


def test_new_donors_may_be_of_another_history() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        download = here.download(messenger)
        await download.run(1)
        island.states[0].position = Position(round=1, tokens=99)
        island.describe()
        download.discard()
        download.use_donors([island.member])
        await enter_state(here, download)

    with_run(test)
