"""Records: of islands in a swarm and in its DHT, addresses in them, what watchers are told, and
orders of operators.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hivemind.dht.validation import DHTRecord
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from diloco.records.metrics import EvalRecord, EventRecord, RoundRecord, StepRecord, to_line
from diloco.runtime.operator_requests import SAVE, STOP
from diloco.status.operator_orders import Order, OrderServer, OrderText, purpose
from diloco.watch.collection.record_check import check_record
from outer.errors import InputError, MessageError, PeerLost
from outer.identity.access import BANNED_FILE
from outer.identity.island_key import SIGNATURE_BYTES
from outer.membership.dht.owned_records import OwnedRecords, make_subkey, parse_subkey
from outer.membership.dht.records import CONFIG_NAME, find_members, read_config
from outer.membership.records import (
    Announcement,
    Publication,
    RunQuery,
    SignedRecord,
    open_records,
    parse_record,
    sign_record,
    sign_withdrawal,
)
from outer.membership.rendezvous import RecordServer
from outer.network.endpoints import Endpoint
from outer.network.run_key import PeerAuth, RunKey, seal
from outer.routes.addresses import parse_island_address, parse_route
from outer.transports.gloo.addresses import check_gloo_address
from outer.transports.gloo.groups import parse_address as parse_gloo_address
from outer.transports.hivemind_addresses import parse_address as parse_libp2p_address
from tests.fuzz.entries import Entries, Entry
from tests.fuzz.loop import LOOP
from tests.outer.nets import key_of, member

RUN_KEY, KEY = RunKey(b"k" * 32), key_of("a")
NOW = 1_800_000_000.0
MEMBER = member(
    "a", control_addresses=["host:1"], text={"tokens": 9, "digest": "0" * 32}, step_seconds=0.5
)
PEER_ID = "12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVyL"
LIBP2P_ADDRESSES = [
    f"{PEER_ID}:0@/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID};/ip4/1.2.3.4/tcp/9/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}",
    f"{PEER_ID}:3@/dns/host/tcp/1;/ip6/::1/tcp/1",
    f"{PEER_ID}:0@",
]
ROUTES = ["203.0.113.7:31400", "[::1]:1", "relay.host:31500/12/payloads"]
GLOO_VALUE = (4).to_bytes(8, "little") + b"host" + (3).to_bytes(8, "little") + b"abc" + bytes(16)
OTHER_CONFIG = b"other: {}"
FILES = {SAVE, STOP, BANNED_FILE}


def build_records() -> Entries:
    """An entry for each kind of record."""
    text = MEMBER.model_dump_json().encode()
    routes, addresses = (
        [each.encode() for each in ROUTES],
        [each.encode() for each in LIBP2P_ADDRESSES],
    )
    island = f"tls:{KEY.public}@{';'.join(ROUTES)}".encode()
    return {
        "record": Entry(_parse_record, [text], is_json=True),
        "signed record": Entry(_open_record, [text], is_json=True),
        "rendezvous": Entry(
            _ask_rendezvous, list(_rendezvous_scripts()), (MessageError, InputError), is_json=True
        ),
        "dht value": Entry(_validate, list(_dht_values()), ()),
        "dht members": Entry(
            _find_members, [b"\x00" + text, b"\x01" + seal(RUN_KEY, "x", text), b"\x02" + text], ()
        ),
        "dht config": Entry(
            _read_config, [b"\x00outer: {}", b"\x02outer: {}", b"\x03x"], (InputError,)
        ),
        "island address": Entry(partial(_parse_text, parse_island_address), [island]),
        "route": Entry(partial(_parse_text, parse_route), routes),
        "libp2p address": Entry(partial(_parse_text, parse_libp2p_address), addresses, (PeerLost,)),
        "gloo address": Entry(
            _parse_gloo_address, [b"gloo:a/0@host:1", b"gloo:a/0@127.0.0.1:65535"], (PeerLost,)
        ),
        "gloo value": Entry(lambda raw: check_gloo_address(raw, GLOO_VALUE, 2), [GLOO_VALUE]),
        "told record": Entry(_check_record, list(_told_records()), (), is_json=True),
        "order": Entry(_carry_out, list(_orders()), is_json=True),
    }


def _parse_record(raw: bytes) -> None:
    found = parse_record("a", raw)
    assert found is None or found.island == "a"


def _open_record(text: bytes) -> None:
    """A record of an island, whatever is in it, with the signature of its key."""
    said = text.decode("utf-8", "replace")
    record = SignedRecord(
        text=said, time=5, signature=KEY.sign("run/record", f"5\n{said}".encode()).hex()
    )
    auth = PeerAuth()
    found = open_records("run", {"a": record}, auth)
    assert auth.rejections.total == 1 - len(found)
    for name, each in found.items():
        assert (name, each.island, each.identity) == ("a", "a", KEY.public), (
            "a record of another island counts"
        )


def _rendezvous_scripts() -> Iterator[bytes]:
    """Calls of a rendezvous, one after the other."""
    record = sign_record(KEY, "run", MEMBER, 1)
    announcement = Announcement(run="run", record=record, life_seconds=60)
    withdrawal = sign_withdrawal(KEY, "run", MEMBER, 2)
    publication = Publication(run="run", text="outer: {}")
    calls = [("announce", announcement), ("publish", publication), ("members", RunQuery(run="run"))]
    more = [
        ("beat", announcement),
        ("config", RunQuery(run="run")),
        ("runs", RunQuery(run="run")),
        ("leave", withdrawal),
    ]
    for script in (calls, [*calls, *more], [calls[0], more[0], more[3], calls[2]]):
        yield json.dumps(
            [[kind, message.model_dump(mode="json")] for kind, message in script]
        ).encode()


def _ask_rendezvous(body: bytes) -> None:
    """Call after call; what island `a` says is signed by it. Raises the last error."""
    server = RecordServer()

    async def main() -> Exception | None:
        last = None
        for kind, values in _calls_in(body):
            said = json.dumps(_signed(kind, values)).encode()
            try:
                if (handler := server.handlers.get(kind)) is not None:
                    await handler(Endpoint("x", 0), said)
            except (MessageError, InputError) as error:
                last = error
        return last

    if (last := LOOP.run_until_complete(main())) is not None:
        raise last


def _calls_in(body: bytes) -> Iterator[tuple[str, Any]]:
    """The calls in a script: a list of pairs. What is none is passed over."""
    script = None
    with suppress(ValueError, RecursionError):
        script = json.loads(body)
    for each in script if isinstance(script, list) else ():
        if isinstance(each, list) and len(each) == 2 and isinstance(each[0], str):
            yield each[0], each[1]


def _signed(kind: str, values: Any) -> Any:
    """The values of an announcement or withdrawal with the signature that its key, if it is that of
    `a`, would make.
    """
    with suppress(KeyError, TypeError, AttributeError, UnicodeEncodeError):
        if kind in ("announce", "beat"):
            record = values["record"]
            body = f"{record['time']}\n{record['text']}".encode()
            return values | {
                "record": record | {"signature": KEY.sign(f"{values['run']}/record", body).hex()}
            }
        if kind == "leave":
            body = f"{values['time']}\n{values['island']}\n{values['incarnation']}".encode()
            return values | {"signature": KEY.sign(f"{values['run']}/withdrawal", body).hex()}
    return values


def _dht_values() -> Iterator[bytes]:
    """Whether it is signed, the length of the subkey, the subkey and the value."""
    for subkey in (make_subkey("a", KEY), make_subkey("b", key_of("b")), "config"):
        packed = MSGPackSerializer.dumps(subkey)
        yield b"\x01" + bytes([len(packed)]) + packed + b"value"
        yield b"\x00" + bytes([len(packed)]) + packed + bytes(SIGNATURE_BYTES)


def _validate(body: bytes) -> None:
    is_signed, size = body[:1] == b"\x01", body[1] if len(body) > 1 else 0
    subkey, value = body[2 : 2 + size], body[2 + size :]
    validator, record = OwnedRecords(KEY), DHTRecord(b"key", subkey, value, get_dht_time() + 10)
    if is_signed:
        record = DHTRecord(record.key, subkey, validator.sign_value(record), record.expiration_time)
    if validator.validate(record):
        assert is_signed, "a value counts that nobody has signed"
        found = parse_subkey(MSGPackSerializer.loads(subkey))
        assert found is not None and found[1] == KEY.public, (
            "a value counts that another has signed"
        )
        assert validator.strip_value(record) == value


@dataclass(frozen=True)
class _Dht:
    """A DHT node of hivemind that has found these values of `a`."""

    name: str
    values: tuple[bytes, ...]
    found: dict[str, Any] = field(default_factory=dict)

    async def get(self, key: str, latest: bool) -> Any:
        subkeys = {make_subkey(self.name, KEY): self.values[0]}
        subkeys |= {make_subkey(self.name, key_of("b")): each for each in self.values[1:]}
        entries = {
            subkey: SimpleNamespace(value=each, expiration_time=NOW)
            for subkey, each in subkeys.items()
        }
        return SimpleNamespace(value=entries)


def _find_members(body: bytes) -> None:
    key, value = _sealed(body, "run/members/a")
    dht: Any = _Dht("a", (value,))
    found = LOOP.run_until_complete(find_members(dht, "run", PeerAuth(key)))
    for name, each in found.items():
        assert (name, each.island, each.identity) == ("a", "a", KEY.public), (
            "a record of another island counts"
        )


def _read_config(body: bytes) -> None:
    key, value = _sealed(body, "run/config")
    values = (value, OTHER_CONFIG) if body[:1] == b"\x03" else (value,)
    dht: Any = _Dht(CONFIG_NAME, values)
    text = LOOP.run_until_complete(read_config(dht, "run", key))
    assert text is None or text.encode() in ((*values, b"") if key is None else (body[1:],))


def _sealed(body: bytes, about: str) -> tuple[RunKey | None, bytes]:
    """(the run key, a value): as it is without a key (0, 3) or with one (1), or sealed with it
    (2).
    """
    kind, value = body[0] % 4 if body else 0, body[1:]
    key = RUN_KEY if kind in (1, 2) else None
    return key, seal(key, about, value) if kind == 2 else value


def _parse_text(parse: Callable[[str], object], raw: bytes) -> None:
    found = parse(raw.decode("utf-8", "replace"))
    assert parse(str(found)) == found


def _parse_gloo_address(raw: bytes) -> None:
    _, port = parse_gloo_address(Endpoint("a", 0), raw.decode("utf-8", "replace"))
    assert 0 < port < 65536


def _told_records() -> Iterator[bytes]:
    """A line of each kind of an island's records."""
    about: dict[str, Any] = {"round": 3, "time": NOW}
    step = StepRecord(
        step=1,
        tokens=2,
        loss=3.0,
        lr=0.1,
        grad_norm=1.0,
        seconds=0.5,
        tokens_per_second=4.0,
        time=NOW,
    )
    attempt = RoundRecord(
        attempt=0, participants=("a", "b"), committed=True, digest="0" * 32, bytes_sent=1,
        bytes_received=2,
        reduce_seconds=0.1, wait_seconds=0.2, pseudo_gradient_norm=1.0, units=[[0, 4, 1]],
        gated={"b": 1},
        ranks=[[0, 1.0]], **about,
    )  # fmt: skip
    records = (
        step,
        attempt,
        EvalRecord(tokens=5, loss=2.0, bits_per_byte=2.9, **about),
        EventRecord(name="lost", text="b: no", time=NOW),
    )
    return (to_line(record).encode() for record in records)


def _check_record(raw: bytes) -> None:
    record = check_record(raw.decode("utf-8", "replace"), NOW)
    if record is not None:
        line = to_line(record)
        assert line.isascii() and line.count("\n") == 1
        assert check_record(line, NOW) is not None, "a record is none once it has been written"


def _orders() -> Iterator[bytes]:
    for action, argument in (("save", ""), ("stop", "12"), ("stop", ""), ("exclude", "b")):
        text = OrderText(
            run="run", island="a", action=action, argument=argument, time=round(1000 * NOW)
        )  # type: ignore[arg-type]
        yield text.model_dump_json().encode()


FOLDER = Path(tempfile.mkdtemp(prefix="diloco-fuzz-"))


def _carry_out(text: bytes) -> None:
    """An order, whatever is in it, with the signature of an operator."""
    said = text.decode("utf-8", "replace")
    if len(said) > 1000:
        raise MessageError("an Order is no longer")
    signature = KEY.sign(purpose("run"), said.encode()).hex()
    order = Order(text=said, operator=KEY.public, signature=signature)
    server = OrderServer("run", FOLDER / "a", [KEY.public], lambda name, text: None)
    try:
        server.carry_out(order, NOW)
    finally:
        found = {
            path.relative_to(FOLDER / "a").as_posix()
            for path in FOLDER.rglob("*")
            if path.is_file()
        }
        for name in found & FILES:
            (FOLDER / "a" / name).unlink()
        assert found <= FILES, f"an order writes {found}"
