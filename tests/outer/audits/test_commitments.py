"""A payload and a statement are bound to who signed them, the plan and the part."""

import pytest
import torch

from outer.audits.commitments import (
    Commitments,
    SignedDigest,
    build_statement,
    digest_of,
    is_statement_signed,
    sign_payload,
)
from outer.errors import PoisonError, TransportError
from outer.identity.known_names import KnownNames
from tests.outer.audits.plans import build_plan
from tests.outer.nets import key_of, payload

PLAN, LATER = build_plan("abc"), build_plan("abc", attempt=1)


def commitments(island: str) -> Commitments:
    names = KnownNames()
    names.adopt({name: key_of(name).public for name in "abc"})
    return Commitments(key_of(island), names)


def test_a_payload_arrives_as_it_was_sealed():
    opened = commitments("b").open(PLAN, 3, "a", commitments("a").seal(PLAN, 3, payload(1000)))
    assert torch.equal(opened.payload, payload(1000))
    assert opened.signature == sign_payload(key_of("a"), PLAN, 3, payload(1000))


@pytest.mark.parametrize(
    ("island", "plan", "part"),
    [("c", PLAN, 3), ("a", LATER, 3), ("a", PLAN, 4)],
    ids=["island", "plan", "part"],
)
def test_a_payload_of_another_island_plan_or_part_is_refused_and_blames_its_sender(
    island, plan, part
):
    sealed = commitments("a").seal(PLAN, 3, payload(1000))
    with pytest.raises(PoisonError, match="without its signature") as error:
        commitments("b").open(plan, part, island, sealed)
    assert error.value.peer == island


def test_a_payload_that_was_changed_is_refused():
    sealed = commitments("a").seal(PLAN, 3, payload(1000))
    sealed[17] ^= 1
    with pytest.raises(PoisonError):
        commitments("b").open(PLAN, 3, "a", sealed)


def test_an_island_whose_key_is_not_known_is_not_blamed():
    sealed = commitments("a").seal(PLAN, 3, payload(1000))
    with pytest.raises(TransportError, match="key of island 'a' is not known") as error:
        Commitments(key_of("b"), KnownNames()).open(PLAN, 3, "a", sealed)
    assert not isinstance(error.value, PoisonError)


def test_a_statement_holds_for_its_signer_and_contents_only():
    inputs = [
        SignedDigest(digest=digest_of(payload(10, seed)), signature="0" * 128) for seed in range(3)
    ]
    statement = build_statement(key_of("b"), PLAN, 1, payload(10), inputs)
    assert is_statement_signed(key_of("b").public, statement)
    assert not is_statement_signed(key_of("a").public, statement)
    for change in ({"part": 2}, {"plan": LATER.id}, {"mean": "0" * 64}, {"payloads": inputs[::-1]}):
        assert not is_statement_signed(key_of("b").public, statement.model_copy(update=change))
