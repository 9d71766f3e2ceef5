"""Which claims to be ahead are followed: those behind which enough islands stand that this island
knows.
"""

from outer.agreement.messages import Plan, Status
from outer.agreement.proofs.certificate import (
    MAX_INTRODUCTIONS,
    Certificate,
    Proof,
    ProofQuery,
)
from outer.agreement.rules import Behind
from outer.agreement.state_machine import RoundProtocol
from tests.outer.protocols import gathering, node
from tests.outer.signers import FakeSigner, certify, public_of, signed_yes
from tests.outer.world import digest_after, ready_of

AHEAD = Status(round=5, tokens=500, digest="cc" * 8)


def certificate_of(*names: str, status: Status = AHEAD) -> Certificate:
    return certify(status, {name: FakeSigner(name) for name in names})


def holding(name: str, *others: str, **rules: object) -> RoundProtocol:
    """An island after a commit with the others, who are in the run."""
    made = node(name, "".join(others), **rules)
    state = Status(round=1, tokens=20, digest="11" * 8)
    made.knowledge.claims.add(certificate_of(name, *others, status=state))
    made.update_status(state)
    return made


def claims(
    here: RoundProtocol, sender: str, proof: Proof | None = None, status: Status = AHEAD
) -> bool:
    """Whether the island follows a claim, after it has heard the proof if it asks for one."""
    here.outbox.clear()
    here.receive(sender, status)
    asked = [
        message for to, message in here.outbox if to == sender and isinstance(message, ProofQuery)
    ]
    if asked and proof is not None:
        here.receive(sender, proof)
    return isinstance(here.knowledge.behind(is_settled=True), Behind)


def test_a_claim_is_asked_for_its_proof_and_then_followed() -> None:
    a = holding("a", "b", "c", quorum=2)
    assert not claims(a, "b")
    assert a.outbox == [("b", ProofQuery(round=5, digest="cc" * 8))]
    assert claims(a, "b", Proof(certificate=certificate_of("b", "c")))


def test_what_two_islands_claim_needs_no_proof_where_two_commit() -> None:
    a = holding("a", "b", "c", quorum=2)
    assert not claims(a, "b")
    assert claims(a, "c")


def test_one_island_alone_proves_nothing_where_two_commit() -> None:
    a = holding("a", "b", "c", quorum=2)
    assert not claims(a, "b", Proof(certificate=certificate_of("b")))
    assert a.knowledge.claims.refused == [
        (
            "b",
            "round 5 with 500 tokens: 1 of the 2 islands needed, that this island knows, have "
            "signed it",
        )
    ]


def test_invented_islands_do_not_count_for_who_knows_others() -> None:
    a = holding("a", "b", "c", quorum=2)
    assert not claims(a, "b", Proof(certificate=certificate_of("b", "x", "y", "z")))
    assert not claims(a, "x") and not claims(a, "y")


def test_beside_most_of_the_islands_that_it_knows_an_island_counts_others_too() -> None:
    a = holding("a", "b", "c", "d", quorum=4)
    assert not claims(a, "b", Proof(certificate=certificate_of("b", "x", "y", "z")))
    assert claims(a, "c", Proof(certificate=certificate_of("b", "c", "x", "y")))


def test_an_island_that_is_held_up_counts_islands_that_it_does_not_know_until_it_goes_on() -> None:
    a = holding("a", "b", quorum=2)
    proof = Proof(certificate=certificate_of("x", "y"))
    assert not claims(a, "x", proof)
    a.knowledge.is_held_up = True
    assert claims(a, "x", proof)
    a.update_status(AHEAD)
    assert not a.knowledge.is_held_up


def test_a_fresh_island_that_is_held_up_follows_an_island_that_was_alone_so_far() -> None:
    a = node("a", "b", quorum=2)
    assert not claims(a, "b", Proof(certificate=certificate_of("b")))
    a.knowledge.is_held_up = True
    assert claims(a, "b", Proof(certificate=certificate_of("b")))


def test_invented_islands_do_not_count_where_the_operator_lists_the_keys() -> None:
    a = node("a", "bc", quorum=2)
    a.knowledge.signer.allowed = frozenset(map(public_of, "abc"))  # pyright: ignore[reportAttributeAccessIssue]
    assert not claims(a, "b", Proof(certificate=certificate_of("b", "x", "y")))
    assert not claims(a, "x")
    assert claims(a, "c", Proof(certificate=certificate_of("b", "c")))


def test_a_certificate_of_another_state_proves_nothing() -> None:
    a = holding("a", "b", "c", quorum=2)
    older = certificate_of("b", "c", status=Status(round=4, tokens=400, digest="dd" * 8))
    assert not claims(a, "b", Proof(certificate=older))
    assert "the certificate is of another state" in a.knowledge.claims.refused[0][1]


def test_a_proof_that_nobody_asked_for_is_not_read() -> None:
    a = holding("a", "b", "c", quorum=2)
    a.receive("b", Proof(certificate=certificate_of("b", "c")))
    assert not a.knowledge.claims.certificates


def test_who_proves_nothing_is_waited_for_until_it_has_answered() -> None:
    a = gathering("a", "bc", ready="b", quorum=2)
    a.receive("c", AHEAD)
    assert a.try_plan(is_late=False) is None
    a.receive("c", Proof())
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b"]


def test_who_never_answers_is_waited_for_no_longer_than_others() -> None:
    a = gathering("a", "bc", ready="b", quorum=2)
    a.receive("c", AHEAD)
    assert isinstance(a.try_plan(is_late=True), Plan)


def test_islands_that_came_meanwhile_are_introduced_by_those_that_were_known() -> None:
    """While "a" was away, "d" has taken part beside "b" and "c", and then "e" beside "c" and "d";
    "b" and "c" left.
    """
    a = holding("a", "b", "c", quorum=2)
    beside = [
        certificate_of(*names, status=Status(round=n, tokens=30 * n, digest="ee" * 8))
        for n, names in ((2, "bcd"), (3, "cde"))
    ]
    assert not claims(
        holding("a", "b", "c", quorum=2), "d", Proof(certificate=certificate_of("d", "e"))
    )
    assert claims(a, "d", Proof(certificate=certificate_of("d", "e"), introductions=beside))
    assert a.knowledge.claims.witnesses.known.keys() == set("abcde")


def test_a_liar_introduces_nobody_by_itself() -> None:
    a = holding("a", "b", "c", quorum=2)
    alone = certificate_of("b", "x", "y", status=Status(round=2, tokens=60, digest="ee" * 8))
    assert not claims(
        a, "b", Proof(certificate=certificate_of("b", "x", "y"), introductions=[alone])
    )


def test_what_is_kept_of_introductions_is_bounded() -> None:
    witnesses = holding("a", "b").knowledge.claims.witnesses
    for number in range(100):
        witnesses.admit(certificate_of("a", f"island-{number}"))
    assert len(witnesses.introductions) == MAX_INTRODUCTIONS


def test_a_run_whose_quorum_was_raised_goes_on_from_what_fewer_have_signed() -> None:
    a = holding("a", "b", quorum=4)
    assert claims(a, "b", Proof(certificate=certificate_of("a", "b")))


def test_with_a_quorum_of_one_an_island_alone_is_followed() -> None:
    assert claims(holding("a", "b", "c"), "b")


def test_of_equal_histories_the_one_that_more_have_signed_survives_whatever_its_digest() -> None:
    a = holding("a", "b", "c")
    lower = Status(round=1, tokens=20, digest="00" * 8)
    assert not claims(a, "b", Proof(), lower)
    assert not claims(a, "b", Proof(certificate=certificate_of("b", status=lower)), lower)


def test_a_commit_leaves_its_certificate_and_makes_the_participants_known() -> None:
    a, b = gathering("a", "b", ready="b"), gathering("b", "a", ready="a")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    b.receive("a", plan)
    digest = digest_after(plan)
    for island in (a, b):
        island.vote(signed_yes(plan, island.knowledge.me, digest))
    for one, other in ((a, b), (b, a)):
        receipt = other.receive(one.knowledge.me, signed_yes(plan, one.knowledge.me, digest))
        assert receipt is not None
        one.receive(other.knowledge.me, receipt)
    assert [a.conclude(is_late=False), b.conclude(is_late=False)] == ["commit", "commit"]
    a.update_status(Status(round=1, tokens=20, digest=digest))
    proof = a.receive("c", ProofQuery(round=1, digest=digest))
    assert isinstance(proof, Proof) and proof.certificate is not None
    assert proof.certificate.statement == plan.statement(digest)
    assert a.knowledge.claims.witnesses.known.keys() == {"a", "b"}


def test_a_yes_that_is_not_signed_is_not_counted_whenever_it_comes() -> None:
    a, b = gathering("a", "b", ready="b"), gathering("b", "a", ready="a")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    forged = signed_yes(plan, "a", "11" * 8).model_copy(update={"digest": "22" * 8})
    b.receive("a", forged)
    b.receive("a", plan)
    assert (plan.id, "a") not in b.vote_table.votes


def test_a_plan_that_gives_an_island_another_key_is_refused() -> None:
    a = gathering("a", "b", ready="b")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    b = gathering("b", "ac", ready="a")
    wrong = ready_of(node("c", "")).model_copy(update={"key": public_of("thief")})
    b.receive("a", plan.model_copy(update={"participants": [*plan.participants, wrong]}))
    assert b.plan is None
    assert "belongs to the key" in b.outbox[-1][1].cause  # pyright: ignore[reportAttributeAccessIssue]
