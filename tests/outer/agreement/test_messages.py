"""Messages between islands: votes, objections to plans, and the rejection of malformed ones."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outer.agreement.messages import (
    Goodbye,
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Ready,
    Status,
    Vote,
    VoteReceipt,
)
from outer.agreement.rules import Rules, find_behind, find_objection
from outer.agreement.votes import VoteTable
from outer.errors import MessageError
from outer.leases.ledger import Ledger, Terms, reopen
from outer.network.endpoints import Endpoint
from outer.network.messages import Message, check_carriers, pack_carriers, parse, unpack_carriers
from outer.state.part_state import Position
from outer.transfer.donor import Description, PartRequest, StateRequest
from tests.outer.signers import public_of

DIGESTS = {"x": "aa" * 16, "y": "bb" * 16, "z": "cc" * 16}
NUM_PARTS = 5
RULES = Rules(num_parts=NUM_PARTS)


def ready(island: str, digest: str = "x", round_number: int = 3, **changes: object) -> Ready:
    """Ready message of an island with two ranks."""
    fields = {
        "island": island,
        "incarnation": "0123456789abcdef",
        "key": public_of(island),
        "round": round_number,
        "attempt": 0,
        "tokens": 100,
        "weight": 100,
        "base_tokens": 600,
        "digest": DIGESTS[digest],
        "carriers": [(0, 3), (1, 2)],
        "transport_addresses": [f"t{island}0", f"t{island}1"],
        "control_addresses": [f"c{island}0", f"c{island}1"],
    }
    return Ready(**{**fields, **changes})


def plan_of(*names: str, attempt: int = 0) -> Plan:
    others = [ready(name) for name in names[1:]]
    return Plan(
        round=3,
        attempt=attempt,
        planner=names[0],
        participants=[ready(names[0], attempt=attempt), *others],
    )


def vote(plan: Plan, island: str, digest: str | None = "x") -> Vote:
    return (
        Vote.no(plan, island, "broken")
        if digest is None
        else Vote.yes(plan, island, DIGESTS[digest])
    )


def tally(plan: Plan, votes: list[Vote]) -> str:
    vote_table = VoteTable()
    for cast in votes:
        vote_table.add(cast)
    return vote_table.tally(plan)


TALLIES = {
    "commit": [["x", "x", "x"]],
    "abort": [
        ["x", "x", None],
        ["x", "y", "x"],
        [None, "-", "-"],
        ["x", "y", "-"],
        [None, None, None],
    ],
    "open": [["x", "x", "-"], ["-", "-", "-"], ["-", "x", "-"]],
}


@pytest.mark.parametrize(
    ("outcome", "cast"), [(o, cast) for o, casts in TALLIES.items() for cast in casts]
)
def test_all_equal_votes_commit_and_one_no_or_another_digest_aborts(
    outcome: str, cast: list[str | None]
) -> None:
    plan = plan_of("a", "b", "c")
    votes = [
        vote(plan, name, digest) for name, digest in zip("abc", cast, strict=True) if digest != "-"
    ]
    assert tally(plan, votes) == outcome


def test_votes_of_islands_outside_of_the_plan_do_not_count() -> None:
    plan = plan_of("a", "b")
    votes = [vote(plan, "a"), vote(plan, "b"), vote(plan, "q", None), vote(plan, "r", "y")]
    assert tally(plan, votes) == "commit"


def test_the_first_vote_of_an_island_counts() -> None:
    plan = plan_of("a", "b")
    assert tally(plan, [vote(plan, "a"), vote(plan, "b", None), vote(plan, "b")]) == "abort"


MAJORITIES = [("xxy", "x"), ("xyy", "y"), ("xy", "x"), ("yx", "x"), ("zxyyx", "x"), ("z", "z")]


@pytest.mark.parametrize(("digests", "expected"), MAJORITIES)
def test_of_equal_histories_the_one_that_most_hold_survives_or_the_lowest_digest(
    digests: str, expected: str
) -> None:
    held = [Status(round=1, tokens=5, digest=DIGESTS[digest]) for digest in digests]
    for order in (held, held[::-1]):
        live = {f"island-{number}": status for number, status in enumerate(order)}
        own = Status(round=1, tokens=5, digest="ff" * 16)
        behind = find_behind("me", own, live, held.count, is_settled=True)
        assert behind is not None
        assert {live[donor].digest for donor in behind.donors} == {DIGESTS[expected]}


@pytest.mark.parametrize("is_coming", [True, False])
def test_before_the_first_commit_nobody_follows_another_whose_state_nobody_can_give(
    is_coming: bool,
) -> None:
    own = Status(round=0, tokens=0, digest=DIGESTS["y"])
    live = {"other": Status(round=0, tokens=0, digest=DIGESTS["x"], is_coming=is_coming)}
    assert find_behind("me", own, live, lambda status: 1, is_settled=True) is None


@pytest.mark.parametrize(("digests", "num_weighed"), [("xxxx", 0), ("xxxy", 2)])
def test_each_state_is_weighed_once_however_many_hold_it(digests: str, num_weighed: int) -> None:
    live = {
        name: Status(round=1, tokens=5, digest=DIGESTS[d])
        for name, d in zip("abcd", digests, strict=True)
    }
    weighed: list[Status] = []
    find_behind("me", live["a"], live, lambda status: weighed.append(status) or 1, is_settled=True)
    assert len(weighed) == num_weighed


def test_a_plan_makes_the_statement_of_a_digest_once_and_keeps_no_others() -> None:
    plan = plan_of("a", "b")
    first = plan.statement(DIGESTS["x"])
    assert plan.statement(DIGESTS["x"]) is first
    assert plan.statement(DIGESTS["y"]).digest == DIGESTS["y"]
    assert plan.statement(DIGESTS["x"]) == first and plan.statement(DIGESTS["x"]) is not first


def test_a_plan_knows_every_endpoint() -> None:
    plan = plan_of("a", "c", "d")
    assert plan.names == ["a", "c", "d"]
    assert plan.addresses[Endpoint("c", 1)] == "tc1" and len(plan.addresses) == 6


def test_plans_that_differ_in_anything_have_ids_of_their_own() -> None:
    plans = [
        plan_of("a", "b"),
        plan_of("b", "a"),
        plan_of("a", "b", attempt=1),
        plan_of("a", "b", "c"),
    ]
    assert len({plan.id for plan in plans}) == 4
    assert plan_of("a", "b").id == plans[0].id


def test_a_sound_plan_passes() -> None:
    assert find_objection(plan_of("a", "b", attempt=1), ready("b"), RULES) is None


def test_a_plan_with_the_ready_of_an_attempt_before_passes_if_its_word_is_not_given() -> None:
    plan, own = plan_of("a", "b"), ready("b", attempt=2)
    assert find_objection(plan, own, RULES, first_attempt=0) is None
    assert (
        find_objection(plan, own, RULES, first_attempt=1)
        == "the plan does not contain the current ready message of 'b'"
    )
    later = changed(plan, participants=[ready("a"), ready("b", attempt=3)])
    assert (
        find_objection(later, own, RULES)
        == "the plan does not contain the current ready message of 'b'"
    )


def changed(plan: Plan, **changes: object) -> Plan:
    return plan.model_copy(update=changes)


BAD_PLANS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "another round": (lambda p: changed(p, round=4), "round 4, but 'b' is in round 3"),
    "out of order": (lambda p: changed(p, participants=p.participants[::-1]), "out of order"),
    "one twice": (
        lambda p: changed(p, participants=[*p.participants, p.participants[-1]]),
        "repeated",
    ),
    "without us": (
        lambda p: changed(p, participants=p.participants[:1]),
        "the plan does not contain the current ready message of 'b'",
    ),
    "with what we said before": (
        lambda p: changed(p, participants=[p.participants[0], ready("b", tokens=99)]),
        "the plan does not contain the current ready message of 'b'",
    ),
    "another state": (
        lambda p: changed(p, participants=[ready("a", "y"), ready("b")]),
        "the state of 'a' differs",
    ),
    "a part without a carrier": (
        lambda p: changed(p, participants=[ready("a", carriers=[(0, 4)]), ready("b")]),
        "do not cover 5 parts",
    ),
}


@pytest.mark.parametrize("kind", BAD_PLANS)
def test_a_plan_that_cannot_be_ours_is_refused(kind: str) -> None:
    change, text = BAD_PLANS[kind]
    assert text in (find_objection(change(plan_of("a", "b", attempt=1)), ready("b"), RULES) or "")


@given(carriers=st.lists(st.integers(0, 3), max_size=60))
def test_packed_carriers_unpack_to_the_same(carriers: list[int]) -> None:
    packed = pack_carriers(carriers)
    assert list(unpack_carriers(packed)) == carriers
    check_carriers(packed, len(carriers), num_ranks=4)


BAD_CARRIERS = {
    "too few": [(0, 4)],
    "too many": [(0, 6)],
    "a rank too high": [(0, 4), (2, 1)],
    "a negative rank": [(-1, 5)],
    "a negative count": [(0, 6), (1, -1)],
    "an empty run": [(0, 5), (1, 0)],
    "a huge run": [(0, 1 << 60)],
    "none": [],
}


@pytest.mark.parametrize("kind", BAD_CARRIERS)
def test_carriers_that_do_not_cover_the_parts_are_refused(kind: str) -> None:
    with pytest.raises(MessageError, match="do not cover 5 parts with 2 ranks"):
        check_carriers(BAD_CARRIERS[kind], NUM_PARTS, num_ranks=2)


def test_an_island_must_give_two_addresses_a_rank() -> None:
    with pytest.raises(MessageError, match="unequal numbers of addresses"):
        ready("a", control_addresses=["c"]).check(NUM_PARTS)


ACCOUNT = reopen(Ledger(frontier=9, returned=(range(2, 8, 3),)), 2, Terms(inner_steps=2))
MESSAGES: list[Message] = [
    ACCOUNT,
    ready("a"),
    plan_of("a", "b"),
    vote(plan_of("a", "b"), "a"),
    vote(plan_of("a", "b"), "a", None),
    Status(round=2, tokens=7, digest=DIGESTS["x"]),
    OutcomeQuery(plan="0" * 32, round=1),
    OutcomeReply(plan="0" * 32, outcome="open"),
    VoteReceipt(plan="0" * 32, outcome="abort"),
    Goodbye(island="a", incarnation="0" * 8, round=2, steps=3),
    StateRequest(round=None),
    Position(round=7, tokens=1 << 40),
    Position(round=7, tokens=1 << 40, ledger=ACCOUNT),
    PartRequest(part=3),
    Description(
        digest="ab" * 16,
        position=Position(round=1, tokens=2),
        fingerprint="cd" * 16,
        carriers=[(0, 3), (1, 2)],
    ),
]
KINDS = list(dict.fromkeys(type(message) for message in MESSAGES))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert parse(type(message), message.model_dump_json().encode()) == message


def parses_or_is_refused(kind: type[Message], body: bytes) -> None:
    """Parsing a peer's bytes may raise nothing but MessageError."""
    try:
        assert isinstance(parse(kind, body), kind)
    except MessageError as error:
        assert f"a {kind.__name__}" in str(error)


@given(kind=st.sampled_from(KINDS), body=st.binary(max_size=200))
def test_random_bytes_are_refused(kind: type[Message], body: bytes) -> None:
    parses_or_is_refused(kind, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(message=st.sampled_from(MESSAGES), data=st.data())
@settings(max_examples=300, deadline=None)
def test_messages_with_any_value_in_any_field_are_refused_or_understood(
    message: Message, data: st.DataObject
) -> None:
    fields = json.loads(message.model_dump_json())
    name = data.draw(st.sampled_from([*fields, "another"]))
    fields[name] = data.draw(JSON)
    parses_or_is_refused(type(message), json.dumps(fields).encode())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_deep_nesting_is_refused(kind: type[Message]) -> None:
    with pytest.raises(MessageError):
        parse(kind, b"[" * 200_000)


BAD_FIELDS = {
    "island": ["", "a b", "x" * 65, "a/b", 3],
    "incarnation": ["", "xyz", "AB" * 8],
    "round": [-1, 1 << 30, "3", 1.5, True],
    "tokens": [-1, 1 << 53, None],
    "digest": ["", "g" * 32, None],
    "carriers": [[[0]], [[0, 1, 2]], [["0", 1]], {"0": 5}, None],
    "epoch": ["a b", "x" * 97, 5],
    "transport_addresses": [[], [3], "tcp"],
    "stranger": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in BAD_FIELDS.items() for v in values]
)
def test_a_ready_with_a_bad_field_is_refused_with_its_name(field: str, value: object) -> None:
    fields = {**json.loads(ready("a").model_dump_json()), field: value}
    with pytest.raises(MessageError, match=f"not a Ready: .*{field}"):
        parse(Ready, json.dumps(fields).encode())
