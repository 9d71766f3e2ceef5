"""The calls that an island answers, made to the servers that answer them in a run."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from diloco.records.metrics import Metrics
from diloco.status.operator_orders import OrderServer
from diloco.status.record_pages import RecordsRequest, RecordsServer
from diloco.status.reply import Place, StatusServer
from outer.agreement.messages import Vote
from outer.audits.commitments import Commitments, SignedPayload
from outer.audits.kept_payloads import KeptPayloads, PayloadRequest, StatementRequest
from outer.config import OuterOptimizerConfig
from outer.diagnostics import BytesRequest, DiagnosticsServer, DialRequest, ProbeResponder
from outer.errors import InputError, PeerLost, TransportError
from outer.gossip.server import GossipServer, Meet, PublishedShare, Take, Tell
from outer.identity.known_names import KnownNames
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint, Handler, Lane
from outer.network.messages import Message
from outer.reduce.attempt import Attempts
from outer.state.global_state import GlobalState
from outer.state.part_state import Position
from outer.transfer.donor import Donor, MeanRequest, PartRequest, ReleaseRequest, StateRequest
from outer.transports.gloo.addresses import AddressExchange, AddressQuery
from tests.fuzz.entries import Entry
from tests.fuzz.loop import LOOP, finish_or_leave
from tests.outer.audits.plans import build_plan
from tests.outer.donors import PARTS, SPACE, values
from tests.outer.nets import key_of

PLAN = build_plan("abc")
CALLER = Endpoint("a", 0)
MOST_CALLS = 8
SECONDS = 0.1


class Switchboard:
    """A messenger that keeps who answers which call, and reaches nobody."""

    address = "here"

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def serve(self, kind: str, handler: Handler) -> None:
        self.handlers[kind] = handler

    async def call(
        self,
        address: str,
        kind: str,
        body: bytes,
        *,
        timeout_seconds: float,
        lane: Lane = "control",
        longest: int = 0,
    ) -> bytes:
        raise PeerLost(address, "it cannot be reached")

    def on_malformed(self, address: str, cause: str) -> None:
        raise AssertionError("nobody is called")

    async def close(self) -> None:
        """Nothing is open."""


def calls_entry() -> Entry:
    """An input is a list of calls: [kind, fields]."""
    seeds = [
        json.dumps([[kind, message and message.model_dump(mode="json")]]).encode()
        for kind, message in _calls()
    ]
    together = [
        [kind, message and message.model_dump(mode="json")] for kind, message in list(_calls())[::2]
    ]
    seeds.append(json.dumps(together[:MOST_CALLS]).encode())
    return Entry(
        _make_calls, seeds, (TransportError, InputError), is_json=True, most_seconds=SECONDS
    )


def _calls() -> Iterator[tuple[str, Message | None]]:
    """One call of each kind that the servers answer, with its message or none."""
    yield "probe", None
    yield "probe_bytes", BytesRequest(num_bytes=9)
    yield "probe_sink", None
    yield "dial_back", DialRequest(address="tcp://127.0.0.1:1")
    yield "gloo_address", AddressQuery(epoch="1")
    yield "gloo_built", AddressQuery(epoch="1")
    yield "statement", StatementRequest(plan=PLAN.id, part=0)
    yield "shown", PayloadRequest(plan=PLAN.id, part=0, island="a")
    yield "meet", Meet(round=1)
    yield "take", Take(round=1, part=0)
    yield "tell", Tell(round=1, has_all=True)
    yield "vote", Vote.no(PLAN, "a", "broken")
    yield "state", StateRequest(round=None)
    yield "part", PartRequest(part=0)
    yield "mean", MeanRequest(part=0, round=0)
    yield "taken", ReleaseRequest(worker=None)
    yield "island_records", RecordsRequest(journal="", offset=0)
    yield "island_status", None


def _make_calls(body: bytes) -> None:
    """Call after call of another island. Raises the last error."""
    script, last = None, None
    with suppress(ValueError, RecursionError):
        script = json.loads(body)
    for each in script[:MOST_CALLS] if isinstance(script, list) else ():
        if isinstance(each, list) and len(each) == 2 and isinstance(each[0], str):
            last = _call(each[0], b"" if each[1] is None else json.dumps(each[1]).encode()) or last
    if last is not None:
        raise last


def _call(kind: str, body: bytes) -> Exception | None:
    if (handler := handlers().get(kind)) is None:
        return None

    async def call() -> bytes:
        return await handler(CALLER, body)

    try:
        reply = finish_or_leave(call())
    except (TransportError, InputError) as error:
        return error
    assert reply is None or isinstance(reply, bytes)
    return None


_built: dict[str, Handler] = {}


def handlers() -> dict[str, Handler]:
    """Who answers which call. The servers are the same for all inputs, as in a run."""
    if not _built:
        _built.update(LOOP.run_until_complete(_build()))
    return _built


async def _build() -> dict[str, Handler]:
    board: Any = Switchboard()
    folder = Path(tempfile.mkdtemp(prefix="diloco-fuzz-"))
    names = KnownNames()
    names.adopt({name: key_of(name).public for name in "abc"})
    state = GlobalState(values(0), OuterOptimizerConfig())
    donor = Donor(state, board)
    payloads = {
        part: torch.zeros(2 * SPACE.parts[part].num_elements, dtype=torch.uint8) for part in PARTS
    }
    state.commit(values(1), Position(round=1, tokens=10), payloads)
    donor.describe("0" * 32, [0] * len(PARTS), SPACE.fingerprint, ["0" * 8])
    await GossipServer(board, [0] * len(PARTS)).publish(PublishedShare(1, frozenset("a"), payloads))
    kept = KeptPayloads(Commitments(key_of("b"), names))
    kept.begin(PLAN)
    kept.keep(0, {name: SignedPayload(payloads[0]) for name in "abc"}, payloads[0])
    kept.serve(board)
    DiagnosticsServer(board, ProbeResponder())
    exchange = AddressExchange(board)
    exchange.begin("1")
    transport: Any = None  # What an attempt hears of votes needs neither.
    board.serve("vote", Attempts(transport, transport, Deadlines(1.0)).on_vote)
    metrics = Metrics(folder / "metrics.jsonl")
    place = Place(island="b", num_steps=9, num_rounds=3, ranks=1, mesh="", hardware="")
    StatusServer(board, metrics, place, lambda: state.position, None)
    RecordsServer(metrics.path).serve(board)
    OrderServer("run", folder / "b", [], lambda name, text: None).serve(board)
    return board.handlers
