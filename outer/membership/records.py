"""What islands keep in the swarm: their records, checked when read, and the rule of one island a name.

And the bodies of the calls to a rendezvous, both ways, as JSON: whoever reads one has it checked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outer.errors import InputError, MessageError
from outer.membership.base import Member

MAX_CONFIG_BYTES = 1 << 16
MAX_RECORD_BYTES = 1 << 20
RUNS_KEY = "diloco/runs"
"""Where the runs of a swarm are listed, for joiners that know only an address."""
MAX_LIFE_SECONDS = 60.0
"""Longest that a record may stay at a rendezvous after its island was last heard of."""

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
IslandName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Digest = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]
M = TypeVar("M", bound=BaseModel)
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class Announcement(BaseModel):
    """`announce`, `beat`: an island's record, to be kept for so long."""

    model_config = _STRICT
    run: RunName
    member: Member
    life_seconds: float = Field(gt=0, le=MAX_LIFE_SECONDS)


class Parting(BaseModel):
    """`leave`."""

    model_config = _STRICT
    run: RunName
    island: IslandName
    incarnation: str = Field(max_length=32)


class Publication(BaseModel):
    """`publish`: a run's config text."""

    model_config = _STRICT
    run: RunName
    text: str = Field(max_length=MAX_CONFIG_BYTES)


class Question(BaseModel):
    """`members`, `config`: about a run."""

    model_config = _STRICT
    run: RunName
    seen: Digest = ""
    """Of the records that the caller knows; "": of none, and the answer comes at once."""


class Records(BaseModel):
    """The answer to `members`: records by island, each Member as JSON; None: those that were seen."""

    model_config = _STRICT
    server: Digest
    """Drawn anew by each process that serves."""
    digest: Digest
    records: dict[IslandName, str] | None
    has_config: bool


class ConfigText(BaseModel):
    """The answer to `config`."""

    model_config = _STRICT
    text: str | None = Field(max_length=MAX_CONFIG_BYTES)


class KnownRun(BaseModel):
    model_config = _STRICT
    text: str = Field(max_length=MAX_CONFIG_BYTES)
    islands: list[IslandName]


class KnownRuns(BaseModel):
    """The answer to `runs`: those that have a config."""

    model_config = _STRICT
    runs: dict[RunName, KnownRun]


@dataclass(frozen=True)
class RunInfo:
    """A run, as a joiner finds it."""

    config_text: str
    islands: tuple[str, ...]


def parse_message(message: type[M], body: bytes) -> M:
    """The message in `body`. Raises MessageError when it is malformed."""
    try:
        return message.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])[:200]
        raise MessageError(f"a malformed {message.__name__}: {where}: {problem['msg'][:200]}") from None


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
