"""Signatures that an input asks for: where it has one of zeros, the one is put that its island
would make.
"""

import json
from contextlib import suppress
from typing import Any

from outer.agreement.messages import Plan
from outer.agreement.proofs.certificate import Statement
from outer.errors import MessageError
from outer.network.messages import parse
from tests.outer.signers import FakeSigner

NO_SIGNATURE = "0" * 128
WRONG = (KeyError, TypeError, ValueError, AttributeError, IndexError, MessageError)
"""What an input that is no longer of the form leads to; then nothing is signed."""


def sign_certificates(values: Any, honest: str = "") -> None:
    """Sign each certificate within the values for its islands, but not for those that are
    honest.
    """
    if isinstance(values, dict):
        with suppress(*WRONG):
            statement = parse(Statement, json.dumps(values["statement"]))
            islands = zip(values["signatures"], statement.islands, strict=True)
            signed = [_sign(island, statement.text, each, honest) for each, island in islands]
            values["signatures"] = signed
        values = list(values.values())
    for each in values if isinstance(values, list) else ():
        sign_certificates(each, honest)


def sign_votes(values: Any, plan: Plan | None, honest: str = "") -> None:
    """Sign a vote, or a list of votes, on the plan for the islands that are said to cast them."""
    with suppress(*WRONG):
        if plan is None or values["plan"] != plan.id:
            return
        if "signatures" in values:
            cast = zip(plan.names, values["digests"], values["signatures"], strict=True)
            values["signatures"] = [
                _sign(name, plan.statement(d).text, by, honest) for name, d, by in cast
            ]
        elif values["signature"] is not None:
            text = plan.statement(values["digest"]).text
            values["signature"] = _sign(values["island"], text, values["signature"], honest)


def _sign(island: str, text: bytes, signature: str, honest: str) -> str:
    """The island's signature in the place of zeros."""
    return (
        FakeSigner(island).sign(text)
        if signature == NO_SIGNATURE and island not in honest.split()
        else signature
    )
