"""Single islands of the round protocol, for tests that take it step by step."""

from collections.abc import Iterable

import pytest

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Status
from outer.agreement.rules import DIRECT_ISLANDS, Rules
from outer.agreement.state_machine import RoundProtocol
from tests.outer.signers import claims_of
from tests.outer.world import START, ready_of

PASSED_ON = 0
"""Up to so many islands write to each other: to none, so the coordinator and the planner pass
everything on.
"""
DOWN_A_TREE = 1
"""More islands than that pass plans and lists of votes on, each to one other, so that all ranks of
a tree are seen.
"""
WAYS = [
    pytest.param({"direct_islands": DIRECT_ISLANDS}, id="to each other"),
    pytest.param({"direct_islands": PASSED_ON}, id="passed on"),
    pytest.param(
        {"direct_islands": PASSED_ON, "tree_islands": DOWN_A_TREE, "fan_out": 1}, id="down a tree"
    ),
]
"""Rules by which messages reach the others."""


def node(name: str, others: Iterable[str], **rules: object) -> RoundProtocol:
    start, made = Status(round=0, tokens=0, digest=START), Rules(**rules)  # pyright: ignore[reportArgumentType]
    protocol = RoundProtocol(Knowledge(name, made, start, claims_of(name)))
    protocol.knowledge.add(others)
    return protocol


def gathering(name: str, others: str, ready: str = "", **rules: object) -> RoundProtocol:
    """A ready island that knows the status of the others, and that those in `ready` are ready,
    too.
    """
    made = node(name, others, **rules)
    made.prepare(ready_of(made))
    for other in others:
        made.receive(other, ready_of(node(other, "")) if other in ready else made.knowledge.status)
    return made
