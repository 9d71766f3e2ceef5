"""What decodes bytes from a peer and is not fuzzed is found: a kind of message, a codec, a call,
any other decoder.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("hivemind")

from outer.agreement.running.calls import CALLS, REPLIES
from outer.agreement.running.peers import kind_of
from outer.codecs import _BUILDERS
from tests.fuzz.calls import handlers
from tests.fuzz.codecs import codecs
from tests.fuzz.decoders import ROOT, find_decoders
from tests.fuzz.messages import build_messages
from tests.fuzz.protocol import KINDS

CODE = [file for package in ("outer", "diloco") for file in sorted((ROOT / package).rglob("*.py"))]
OF_ANOTHER_GROUP = {
    "announce",
    "beat",
    "members",
    "publish",
    "config",
    "leave",
    "runs",
    "island_order",
}
"""Calls of a rendezvous and of an operator, which the group `records` makes."""
NOT_FROM_A_PEER = {
    "outer.audits.commitments:Commitments.seal": "its own signature",
    "outer.cost:_measure_cached": "its own config",
    "outer.cost:_round_bytes": "its own config",
    "outer.identity.known_names:_load": "its own file",
    "outer.leases.ledger:find_lease": "its own hash",
    "outer.membership.loopback:LoopbackMembership.announce": "the islands of one process",
    "outer.membership.loopback:LoopbackMembership._is_held_by": "the islands of one process",
    "outer.membership.records:parse_records": "the islands of one process",
    "outer.transports.hivemind_addresses:check_multiaddresses": "its own config",
}
DECODED_BY_WHAT_IS_FUZZED = {
    "outer.gossip.shares:ShareDownload._decode": "ShareCoding.decode",
    "outer.membership.dht.membership:HivemindMembership._ping_lost_peers": "parse_address",
    "outer.membership.dht.node:open_dht": "parse_address",
    "outer.membership.dht.node:meet": "parse_address",
    "outer.network.rpc:StreamMessenger._answer_all": "unpack_call",
    "outer.routes.relay:Relay._check": "a Register and a Proof, messages",
    "outer.transports.gloo.addresses:AddressExchange.ask": "GlooAddress, a message",
    "outer.transports.hivemind_daemon:Daemon.open_stream": "parse_address",
    "outer.transports.hivemind_daemon:Daemon.dial": "parse_address",
    "outer.transports.hivemind_daemon:attach_daemon": "parse_address",
    "outer.transports.tls.stream:TlsStream.read": "parse_header",
    "inner.foreign.text:read_json": "parse_json",
}


def test_every_kind_of_message_is_fuzzed() -> None:
    declared = list(_classes())
    messages = {"Message"}
    while more := {name for _, name, bases in declared if messages & bases} - messages:
        messages |= more
    assert {f"{module}.{name}" for module, name, bases in declared if messages & bases} == {
        *build_messages()
    }


def _classes() -> Iterator[tuple[str, str, set[str]]]:
    """(module, name, names of its bases) of every class in our code."""
    for file in CODE:
        module = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                yield module, node.name, {ast.unparse(base) for base in node.bases}


def test_every_codec_is_fuzzed() -> None:
    assert {codec.name for _, codec in codecs()} == {*_BUILDERS, "CarelessCodec"}


def test_every_call_that_islands_answer_is_made() -> None:
    served = {kind for file in CODE for kind in _served(ast.parse(file.read_text()))}
    assert {"part", "island_order", "gloo_address"} <= served
    assert served - {*handlers()} <= OF_ANOTHER_GROUP
    assert {kind_of(model) for model in CALLS} <= {kind_of(model) for model in KINDS.values()}
    assert {*CALLS, *REPLIES.values()} == {*KINDS.values()}


def _served(tree: ast.Module) -> Iterator[str]:
    """The kinds of calls that a module answers, given as text or by a name of the module's own."""
    named = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "serve"
        ):
            kind = node.args[0] if len(node.args) == 2 else None
            if isinstance(kind, ast.Constant):
                yield str(kind.value)
            elif isinstance(kind, ast.Name) and kind.id in named:
                yield str(named[kind.id])


def test_everything_else_that_turns_bytes_into_values_is_reached_by_the_seeds() -> None:
    command = [sys.executable, "-m", "tests.fuzz.decoders"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    unreached = {*find_decoders()} - {*done.stdout.split()}
    known = {*NOT_FROM_A_PEER, *DECODED_BY_WHAT_IS_FUZZED}
    assert unreached - known == set(), "fuzz it (tests/fuzz/groups.py), or say here why not"
    assert known - unreached == set(), "it need not be named here any more"
