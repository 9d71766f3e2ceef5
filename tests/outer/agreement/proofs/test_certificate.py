"""What a certificate must hold to prove a commit."""

import hashlib

import pytest

from outer.agreement.proofs.certificate import Certificate, Statement, build_certificate
from outer.agreement.proofs.signer import IslandSigner
from outer.errors import MessageError
from outer.identity.access import Access
from outer.identity.island_key import IslandKey
from outer.identity.known_names import KnownNames
from outer.network.messages import parse

KEYS = {name: IslandKey(hashlib.sha256(name.encode()).digest()) for name in "abc"}


def signer_of(name: str, run_id: str = "run", access: Access | None = None) -> IslandSigner:
    return IslandSigner(KEYS[name], KnownNames(), run_id, access)


def statement_of(names: str, **changes: object) -> Statement:
    keys = [KEYS[name].public for name in names]
    fields = {
        "plan": "0" * 32,
        "round": 4,
        "base": "aa" * 16,
        "base_tokens": 40,
        "tokens": 70,
        "digest": "bb" * 16,
    }
    return Statement(**(fields | {"islands": list(names), "keys": keys} | changes))  # pyright: ignore[reportArgumentType]


def certificate_of(names: str, run_id: str = "run") -> Certificate:
    statement = statement_of(names)
    return build_certificate(
        statement, {name: signer_of(name, run_id).sign(statement.text) for name in names}
    )


def test_a_certificate_proves_the_state_after_the_commit() -> None:
    certificate = certificate_of("abc")
    certificate.check(signer_of("a").verify)
    assert certificate.claim == (5, 70, "bb" * 16)


@pytest.mark.parametrize(
    "changes",
    [{"digest": "cc" * 16}, {"tokens": 71}, {"round": 5}, {"base": "cc" * 16}, {"plan": "1" * 32}],
    ids=str,
)
def test_nobody_can_change_what_was_signed(changes: dict) -> None:
    signatures = certificate_of("abc").signatures
    forged = Certificate(statement=statement_of("abc", **changes), signatures=signatures)
    with pytest.raises(MessageError, match="a has not signed the certificate of round"):
        forged.check(signer_of("b").verify)


def test_a_signature_of_another_island_or_another_run_does_not_count() -> None:
    certificate = certificate_of("abc")
    by_a = certificate.model_copy(update={"signatures": [certificate.signatures[0]] * 3})
    for bad, name in ((by_a, "b"), (certificate_of("abc", "another run"), "a")):
        with pytest.raises(MessageError, match=f"{name} has not signed"):
            bad.check(signer_of("c").verify)


@pytest.mark.parametrize("names,keys", [("ba", "ba"), ("aa", "aa"), ("ab", "a")])
def test_each_participant_is_there_once_and_has_a_key(names: str, keys: str) -> None:
    statement = statement_of(names, keys=[KEYS[name].public for name in keys])
    signatures = [signer_of(name).sign(statement.text) for name in names]
    with pytest.raises(MessageError, match="repeated, out of order, or without keys"):
        Certificate(statement=statement, signatures=signatures).check(signer_of("a").verify)


def test_a_missing_signature_is_noticed() -> None:
    certificate = certificate_of("abc")
    with pytest.raises(MessageError, match="2 signatures of 3 participants"):
        certificate.model_copy(update={"signatures": certificate.signatures[:2]}).check(
            signer_of("a").verify
        )


def test_a_certificate_of_too_many_islands_is_not_parsed() -> None:
    certificate = certificate_of("a")
    many = certificate.model_copy(update={"signatures": certificate.signatures * 1025})
    with pytest.raises(MessageError, match="signatures"):
        parse(Certificate, many.encode())


def test_a_good_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, signer = certificate_of("abc"), signer_of("a")
    certificate.check(signer.verify)
    monkeypatch.setattr(
        "outer.agreement.proofs.signer.verify", lambda *args: pytest.fail("checked again")
    )
    certificate.check(signer.verify)


def test_noise_is_no_signature() -> None:
    assert not signer_of("a").verify(KEYS["a"].public, b"text", "00" * 64)
    assert not signer_of("a").verify("ff" * 32, b"text", "no digits")


def test_the_operators_word_counts(tmp_path) -> None:
    (tmp_path / "banned").write_text("c\n")
    a, b, c = (KEYS[name].public for name in "abc")
    listed = signer_of("a", access=Access({a, b}, [tmp_path / "banned"]))
    assert [listed.trusts(name, key) for name, key in (("b", b), ("c", c), ("d", "11" * 32))] == [
        True,
        False,
        False,
    ]
    assert signer_of("a").trusts("b", b) is None
