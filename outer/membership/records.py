"""What islands keep in the swarm: their records, checked when read, and the rule of one island a name."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from outer.errors import InputError
from outer.membership.base import Member

MAX_CONFIG_BYTES = 1 << 16
MAX_RECORD_BYTES = 1 << 20
RUNS_KEY = "diloco/runs"
"""Where the runs of a swarm are listed, for joiners that know only an address."""


@dataclass(frozen=True)
class RunInfo:
    """A run, as a joiner finds it."""

    config_text: str
    islands: tuple[str, ...]


def parse_record(island: str, text: str | bytes | None) -> Member | None:
    """The island's record, or None when there is none or it is malformed."""
    if not text or len(text) > MAX_RECORD_BYTES:
        return None
    try:
        member = Member.model_validate_json(text)
    except ValidationError:
        return None
    return member if member.island == island else None


def parse_records(records: Mapping[str, str | bytes]) -> dict[str, Member]:
    """The well-formed records, by island, in the order of their names."""
    parsed = {island: parse_record(island, records[island]) for island in sorted(records)}
    return {island: member for island, member in parsed.items() if member is not None}


def check_identity(member: Member, other: Member | None) -> None:
    """Raise InputError when `other`, alive under the same name, is not this island, restarted or not."""
    if other is not None and other.identity != member.identity:
        raise InputError(
            f"island.name: an island {member.island!r} is in the run already (identity {other.identity[:12]}); "
            "choose another name, or stop that one first"
        )


def check_config_text(text: str) -> None:
    """Raise InputError when the text is too long for the swarm."""
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise InputError(
            f"the run's config is {len(text.encode())} bytes of YAML, at most {MAX_CONFIG_BYTES} can be published"
        )
