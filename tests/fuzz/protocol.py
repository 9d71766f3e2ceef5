"""The round protocol of one island, to which members that may lie send several messages one after
the other.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from outer.agreement.coordination import PlanNotice, PlanQuery
from outer.agreement.messages import (
    Goodbye,
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Settled,
    Status,
    Vote,
    VoteList,
    VoteReceipt,
)
from outer.agreement.proofs.certificate import Proof, ProofQuery, build_certificate
from outer.agreement.running.calls import CALLS, REPLIES
from outer.agreement.state_machine import RoundProtocol
from outer.errors import MessageError
from outer.network.messages import Message, parse
from tests.fuzz.entries import Entry
from tests.fuzz.signed import NO_SIGNATURE, sign_certificates, sign_votes
from tests.outer.protocols import DOWN_A_TREE, PASSED_ON, gathering, node
from tests.outer.world import digest_after, ready_of

KINDS = {model.__name__: model for model in (*CALLS, *REPLIES.values())}
ME, OTHERS = "b", "ac"
"""Island a plans."""
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"direct_islands": PASSED_ON},
    {"direct_islands": PASSED_ON, "tree_islands": DOWN_A_TREE, "fan_out": 1},
    {"has_observers": True, "quorum": 2},
)
MOST_WORDS = 12
SECONDS = 0.1
"""So many words take longer than one."""
Word = tuple[str, Message]
"""Who says it, and what."""


def protocol_entry() -> Entry:
    """An input is a way, by number, and what is said: [sender, kind of message, its fields]."""
    seeds = [_write(way, words) for way in range(len(WAYS)) for words in _conversations(WAYS[way])]
    return Entry(_listen, seeds, is_json=True, most_seconds=SECONDS)


def _conversations(rules: dict[str, Any]) -> Iterator[list[Word]]:
    """What honest islands say in a round that commits, in one that aborts, and from one that is
    ahead.
    """
    plan = _plan_of(rules)
    digest = digest_after(plan)
    votes = [
        Vote.yes(plan, name, digest).model_copy(update={"signature": NO_SIGNATURE})
        for name in "abc"
    ]
    begun: list[Word] = [("a", PlanNotice(plan=plan.id, round=0)), ("a", plan)]
    receipts = [(name, VoteReceipt(plan=plan.id, outcome="open")) for name in OTHERS]
    cast: list[Word] = [("a", votes[0]), ("c", votes[2])]
    listed = VoteList(plan=plan.id, round=0, digests=[digest] * 3, signatures=[NO_SIGNATURE] * 3)
    yield [*begun, *cast, *receipts, ("a", Settled(plan=plan.id, round=0))]
    yield [
        *begun,
        ("a", listed),
        ("c", VoteReceipt(plan=plan.id, outcome="abort")),
        ("a", PlanQuery(plan=plan.id)),
    ]
    yield [
        *begun,
        cast[0],
        ("c", Vote.no(plan, "c", "broken", "a")),
        ("c", OutcomeQuery(plan=plan.id, round=0)),
    ]
    certificate = build_certificate(plan.statement(digest), dict.fromkeys(plan.names, NO_SIGNATURE))
    yield [*begun, ("a", OutcomeReply(plan=plan.id, outcome="commit", certificate=certificate))]
    ahead = Status(round=1, tokens=30, digest=digest)
    shown = Proof(certificate=certificate, introductions=[certificate])
    yield [("a", ahead), ("a", shown), ("c", ahead), ("c", ProofQuery(round=0, digest="00" * 8))]
    yield [
        ("c", ready_of(node("c", "ab", **rules))),
        ("a", Goodbye(island="a", incarnation="0" * 8, round=0, steps=3)),
    ]


def _plan_of(rules: dict[str, Any]) -> Plan:
    readies = [ready_of(node(name, "", **rules)) for name in "abc"]
    return Plan(round=0, attempt=0, planner="a", participants=readies)


def _write(way: int, words: list[Word]) -> bytes:
    said = [
        [sender, type(message).__name__, message.model_dump(mode="json")]
        for sender, message in words
    ]
    return json.dumps({"way": way, "words": said}).encode()


def _listen(body: bytes) -> None:
    """Let the island hear all words. Raises the last of the errors by which it refuses one."""
    try:
        values = json.loads(body)
        way, words = WAYS[values["way"] % len(WAYS)], values["words"][:MOST_WORDS]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise MessageError("no conversation") from None
    here, last = gathering(ME, OTHERS, ready=OTHERS, **way), None
    for word in words:
        with suppress(TypeError, ValueError, KeyError):
            sender, kind, fields = word
            if sender not in OTHERS or not sender or kind not in KINDS:
                continue
            error = _hear(here, sender, KINDS[kind], fields)
            last = error or last
    _go_on(here, is_late=True)
    assert here.knowledge.status.round == 0, "what others say changes this island's state"
    if last is not None:
        raise last


def _hear(
    here: RoundProtocol, sender: str, model: type[Message], fields: Any
) -> MessageError | None:
    """Let the island hear one message, and do what its driver then does. What others sign is
    signed.
    """
    sign_votes(fields, here.plan, honest=ME)
    sign_certificates(fields, honest=ME)
    try:
        message = parse(model, json.dumps(fields))
    except MessageError as error:
        return error
    try:
        here.receive(sender, message)
    except MessageError as error:
        return error
    except (TypeError, ValueError, KeyError) as error:
        raise AssertionError("the island does not bear it") from error
    _go_on(here, is_late=False)
    return None


def _go_on(here: RoundProtocol, *, is_late: bool) -> None:
    try:
        here.resend()
        if here.state == "gathering":
            here.try_plan(is_late=is_late)
        if here.state == "reducing" and here.plan is not None:
            here.vote(Vote.yes(here.plan, ME, digest_after(here.plan)))
        if here.state == "voting":
            outcome, plan = here.conclude(is_late=is_late, is_over=is_late), here.plan
            assert outcome != "commit" or plan is not None
        here.outbox.clear()
    except (TypeError, ValueError, KeyError) as error:
        raise AssertionError("the island does not bear it") from error
