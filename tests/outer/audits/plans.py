"""Support for tests of audits: plans of islands of one rank."""

from outer.agreement.messages import Plan, Ready
from tests.outer.signers import public_of


def build_plan(names: str, attempt: int = 0) -> Plan:
    """The plan of an attempt at round 0, of islands with a part or more each."""
    participants = [
        Ready(
            island=name,
            incarnation="00000000",
            key=public_of(name),
            round=0,
            attempt=attempt,
            base_tokens=0,
            tokens=100,
            weight=100,
            digest="0" * 32,
            carriers=[(0, 1 << 16)],
            transport_addresses=[name],
            control_addresses=[name],
        )
        for name in names
    ]
    return Plan(round=0, attempt=attempt, planner=names[0], participants=participants)
