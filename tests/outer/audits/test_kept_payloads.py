"""What a reducer shows, to whom and how often."""

import asyncio

import pytest
import torch

from outer.audits.commitments import Commitments, SignedPayload, Statement, digest_of
from outer.audits.kept_payloads import MAX_SHOWN, KeptPayloads, PayloadRequest, StatementRequest
from outer.errors import MessageError
from outer.identity.known_names import KnownNames
from outer.membership.loopback import LoopbackMessenger
from outer.network.endpoints import Endpoint
from outer.network.messages import parse
from outer.transports.loopback import Hub
from tests.outer.audits.plans import build_plan
from tests.outer.nets import key_of, payload

PLAN, OTHER_PLAN = build_plan("abc"), build_plan("abc", attempt=1)
REQUEST = PayloadRequest(plan=PLAN.id, part=1, island="a").encode()


class Stage:
    """Island b has reduced part 1 of the plan; any island may ask it."""

    def __init__(self) -> None:
        self._hub = Hub()
        self.kept = KeptPayloads(Commitments(key_of("b"), KnownNames()))
        self.reducer = LoopbackMessenger(self._hub, "run", Endpoint("b", 0))
        self.kept.serve(self.reducer)
        self.kept.begin(PLAN)
        payloads = {
            name: SignedPayload(payload(100, seed), b"s" * 64) for seed, name in enumerate("abc")
        }
        self.kept.keep(1, payloads | {"b": SignedPayload(payload(100, 1))}, payload(100, 9))

    async def ask(self, island: str, kind: str, body: bytes) -> bytes:
        messenger = LoopbackMessenger(self._hub, "run", Endpoint(island, 0))
        return await messenger.call(self.reducer.address, kind, body, timeout_seconds=10)


def test_a_participant_is_shown_payloads_and_a_statement_about_them():
    async def main() -> None:
        stage = Stage()
        shown = await stage.ask("c", "shown", REQUEST)
        statement = parse(
            Statement,
            await stage.ask("c", "statement", StatementRequest(plan=PLAN.id, part=1).encode()),
        )
        assert shown == payload(100, 0).numpy().tobytes()
        assert [each.digest for each in statement.payloads] == [
            digest_of(payload(100, seed)) for seed in range(3)
        ]
        assert statement.mean == digest_of(payload(100, 9))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("island", "request_", "text"),
    [
        ("stranger", PayloadRequest(plan=PLAN.id, part=1, island="a"), "does not take part"),
        ("a", PayloadRequest(plan=OTHER_PLAN.id, part=1, island="a"), "does not take part"),
        ("a", PayloadRequest(plan=PLAN.id, part=2, island="a"), "no mean of part 2"),
        ("a", PayloadRequest(plan=PLAN.id, part=1, island="d"), "contributed nothing"),
    ],
)
def test_nothing_else_is_shown(island: str, request_: PayloadRequest, text: str):
    async def main() -> None:
        with pytest.raises(MessageError, match=text):
            await Stage().ask(island, "shown", request_.encode())

    asyncio.run(main())


def test_a_payload_is_shown_to_an_island_a_few_times_only():
    async def main() -> None:
        stage = Stage()
        for _ in range(MAX_SHOWN):
            await stage.ask("a", "shown", REQUEST)
        with pytest.raises(MessageError, match="already"):
            await stage.ask("a", "shown", REQUEST)
        assert await stage.ask("c", "shown", REQUEST)

    asyncio.run(main())


def test_after_the_attempt_nothing_is_left():
    async def main() -> None:
        stage = Stage()
        assert stage.kept.num_bytes == 300
        stage.kept.clear()
        assert stage.kept.num_bytes == 0
        with pytest.raises(MessageError, match="no longer"):
            await stage.ask("a", "shown", REQUEST)

    asyncio.run(main())


def test_a_part_without_elements_is_shown_too():
    async def main() -> None:
        stage = Stage()
        stage.kept.keep(
            2, {"a": SignedPayload(torch.empty(0, dtype=torch.uint8), b"s" * 64)}, payload(0)
        )
        body = PayloadRequest(plan=PLAN.id, part=2, island="a").encode()
        assert await stage.ask("a", "shown", body) == b""

    asyncio.run(main())
