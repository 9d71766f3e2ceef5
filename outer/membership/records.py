"""The records of islands in a swarm, their checks, and the messages between islands and a rendezvous."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, ValidationError

from outer.errors import InputError
from outer.membership.base import Member
from outer.network.messages import IslandName, Message, RunName

MAX_CONFIG_BYTES = 1 << 16
MAX_RECORD_BYTES = 1 << 20
RUNS_KEY = "diloco/runs"
"""DHT key that lists the runs of a swarm, for joiners that know only an address."""
MAX_LIFE_SECONDS = 60.0
"""Longest time that a rendezvous keeps a record without hearing from its island."""

OptionalDigest = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]
"""A hash in hexadecimal digits, or empty."""


class Announcement(Message):
    """Body of `announce` and `beat`: an island's record and the time for which to keep it."""

    run: RunName
    member: Member
    life_seconds: float = Field(gt=0, le=MAX_LIFE_SECONDS)


class Withdrawal(Message):
    """Body of `leave`: the record to drop."""

    run: RunName
    island: IslandName
    incarnation: str = Field(max_length=32)


class Publication(Message):
    """Body of `publish`: a run's config text."""

    run: RunName
    text: str = Field(max_length=MAX_CONFIG_BYTES)


class RunQuery(Message):
    """Body of `members` and `config`: a question about a run."""

    run: RunName
    seen: OptionalDigest = ""
    """Digest of the records that the caller knows. If it is empty, the answer comes at once."""


class Records(Message):
    """Reply to `members`."""

    server: OptionalDigest
    """Random id of the serving process."""
    digest: OptionalDigest
    records: dict[IslandName, str] | None
    """Members as JSON, by island, or None if the caller knows them already."""
    has_config: bool


class ConfigText(Message):
    """Reply to `config`."""

    text: str | None = Field(max_length=MAX_CONFIG_BYTES)


class KnownRun(Message):
    """A run in the reply to `runs`: its config and the names of its islands."""

    text: str = Field(max_length=MAX_CONFIG_BYTES)
    islands: list[IslandName]


class KnownRuns(Message):
    """Reply to `runs`: the runs that have a config, by name."""

    runs: dict[RunName, KnownRun]


@dataclass(frozen=True)
class RunInfo:
    """A run that a joiner has found in a swarm."""

    config_text: str
    islands: tuple[str, ...]


def parse_record(island: str, text: str | bytes | None) -> Member | None:
    """Parse an island's record. Returns None if there is none, it is malformed, or it is another island's."""
    if not text or len(text) > MAX_RECORD_BYTES:
        return None
    try:
        member = Member.model_validate_json(text)
    except ValidationError:
        return None
    return member if member.island == island else None


def parse_records(records: Mapping[str, str | bytes]) -> dict[str, Member]:
    """Parse records by island, in the order of their names. Malformed records are left out."""
    parsed = {island: parse_record(island, records[island]) for island in sorted(records)}
    return {island: member for island, member in parsed.items() if member is not None}


def check_identity(member: Member, other: Member | None) -> None:
    """Raise InputError if `other`, a live record under the same name, is not an incarnation of the same island."""
    if other is not None and other.identity != member.identity:
        raise InputError(
            f"island.name: an island {member.island!r} is in the run already (identity {other.identity[:12]}); "
            "choose another name, or stop that one first"
        )


def check_config_text(text: str) -> None:
    """Raise InputError when the text is too long for the swarm."""
    if (size := len(text.encode())) > MAX_CONFIG_BYTES:
        raise InputError(f"the run's config is {size} bytes of YAML, at most {MAX_CONFIG_BYTES} can be published")
