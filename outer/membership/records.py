"""The records of islands in a swarm, their checks, and the messages between islands and a
rendezvous.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from outer.errors import InputError
from outer.identity.island_key import IslandKey, PublicKey, Signature, verify
from outer.membership.base import Member
from outer.network.messages import IslandName, Message, RunName, parse
from outer.network.rejections import MalformedError, RefusedError
from outer.network.run_key import PeerAuth

MAX_CONFIG_BYTES = 1 << 16
MAX_RECORD_BYTES = 1 << 20
MAX_RUNS = 32
"""Limit for the runs of a rendezvous."""
MAX_RECORDS = 1024
"""Limit for the records of one run."""
RUNS_KEY = "diloco/runs"
"""DHT key that lists the runs of a swarm, for joiners that know only an address."""
MAX_LIFE_SECONDS = 60.0
"""Longest time for which a rendezvous keeps a record without a message from its island."""
SLACK_MS = int(1000 * MAX_LIFE_SECONDS)
"""A record may be older than the newest one by this much, because several rendezvous may show
different records at one time."""

CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")

OptionalDigest = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]
"""A hash in hexadecimal digits, or empty."""


Time = Annotated[int, Field(ge=0, lt=1 << 53)]
"""Milliseconds since 1970 on the clock of an island. Of its statements, the one with the highest
time counts."""


class SignedRecord(Message):
    """An island's record, signed with its key, so that no other island can have written it."""

    text: str = Field(max_length=MAX_RECORD_BYTES)
    """The Member as JSON."""
    time: Time
    signature: Signature


class Announcement(Message):
    """Body of `announce` and `beat`: an island's record and the time for which to keep it."""

    run: RunName
    record: SignedRecord
    life_seconds: float = Field(gt=0, le=MAX_LIFE_SECONDS)


class Kept(Message):
    """Reply to `announce` and `beat`."""

    newest: Time
    """Time of the island's newest statement on this rendezvous. If it is later than the
    announcement's, the announcement is outdated."""


class Withdrawal(Message):
    """Body of `leave`: the record to drop."""

    run: RunName
    island: IslandName
    incarnation: str = Field(max_length=32)
    key: PublicKey
    time: Time
    signature: Signature


class Publication(Message):
    """Body of `publish`: a run's config text."""

    run: RunName
    text: str = Field(max_length=MAX_CONFIG_BYTES)


class RunQuery(Message):
    """Body of `members` and `config`: a request for data of a run."""

    run: RunName
    server: OptionalDigest = ""
    """Id of the process from which the caller has its records."""
    seen: int = Field(default=0, ge=0, lt=1 << 53)
    """Number of the last change on that server that the caller knows; 0 if it knows none. Then
    the reply is sent at once."""


class Records(Message):
    """Reply to `members`."""

    server: OptionalDigest
    """Random id of the serving process."""
    version: int = Field(ge=0, lt=1 << 53)
    """Number of the last change to the run's records."""
    records: dict[IslandName, SignedRecord] = Field(max_length=MAX_RECORDS)
    """Records by island: those that have changed since the change `seen`."""
    gone: list[IslandName] = Field(default=[], max_length=MAX_RECORDS)
    """Islands whose records have been removed since the change `seen`."""
    is_whole: bool
    """Whether `records` contains all records. In this case the caller forgets all others."""
    has_config: bool


class ConfigText(Message):
    """Reply to `config`."""

    text: str | None = Field(max_length=MAX_CONFIG_BYTES)


class KnownRun(Message):
    """A run in the reply to `runs`: its config and the names of its islands."""

    text: str = Field(max_length=MAX_CONFIG_BYTES)
    islands: list[IslandName] = Field(max_length=MAX_RECORDS)


class KnownRuns(Message):
    """Reply to `runs`: the runs that have a config, by name."""

    runs: dict[RunName, KnownRun] = Field(max_length=MAX_RUNS)


@dataclass(frozen=True)
class RunInfo:
    """A run that a joiner has found in a swarm."""

    config_text: str
    islands: tuple[str, ...]


def parse_record(island: str, text: str | bytes | None) -> Member | None:
    """Parse an island's record. Return None if there is none, it is malformed, or it is another
    island's.
    """
    if not text or len(text) > MAX_RECORD_BYTES:
        return None
    member = _parse(text)
    return member if member is not None and member.island == island else None


@lru_cache(maxsize=2048)
def _parse(text: str | bytes) -> Member | None:
    """Parse a record, or return None. Recent results are cached, because records are read more
    often than they change.
    """
    try:
        return parse(Member, text)
    except MalformedError:
        return None


def parse_records(records: Mapping[str, str | bytes]) -> dict[str, Member]:
    """Parse records by island, in the order of their names. Malformed records are left out."""
    parsed = {island: parse_record(island, records[island]) for island in sorted(records)}
    return {island: member for island, member in parsed.items() if member is not None}


def check_identity(member: Member, other: Member | None) -> None:
    """Raise InputError if `other`, a live record under the same name, is not an incarnation of the
    same island.
    """
    if other is not None and other.identity != member.identity:
        raise name_taken_error(member.island, other.identity)


def name_taken_error(island: str, owner: str) -> InputError:
    return InputError(
        f"island.name: an island {island!r} is in the run already, and the name belongs to its key "
        f"{owner[:16]}...; "
        "choose another name, or start this island in the folder that holds that key"
    )


def sign_record(key: IslandKey, run: str, member: Member, time_ms: int) -> SignedRecord:
    """Return the signed record of an island of the run. `key` must be the key in
    `member.identity`.
    """
    text = member.model_dump_json()
    signature = key.sign(f"{run}/record", f"{time_ms}\n{text}".encode())
    return SignedRecord(text=text, time=time_ms, signature=signature.hex())


def open_record(run: str, record: SignedRecord) -> Member:
    """Return the island that a record describes. Raises RefusedError unless its own key has
    signed it for this run.
    """
    try:
        member = parse(Member, record.text)
    except MalformedError:
        raise RefusedError("record", "a record is malformed") from None
    body = f"{record.time}\n{record.text}".encode()
    if not verify(member.identity, f"{run}/record", body, bytes.fromhex(record.signature)):
        raise RefusedError(
            "record",
            f"a record of {member.island} that its key {member.identity[:16]}... did not sign",
        )
    return member


def open_records(
    run: str, records: Mapping[str, SignedRecord], auth: PeerAuth
) -> dict[str, Member]:
    """Return the islands whose records count, by name. Other records are left out and counted."""
    found: dict[str, Member] = {}
    for island in sorted(records):
        try:
            member = open_record(run, records[island])
            if member.island != island:
                raise RefusedError("record", f"a record of {member.island} under the name {island}")
            check_record(member, records[island].time, auth)
            found[island] = member
        except RefusedError as error:
            auth.rejections.add_error(f"the record of {island}", error)
    return found


def check_record(member: Member, time_ms: int, auth: PeerAuth) -> None:
    """Raise RefusedError if an island's authentic record must not be used: its name is
    another's, it is banned, or too old.
    """
    # With libp2p the address begins with the peer id, which libp2p verifies when the island is
    # called at this address.
    auth.check(member.island, member.identity, member.control_addresses[0].partition(":")[0])
    if auth.names is not None and not auth.names.is_newest(member.island, time_ms, SLACK_MS):
        raise RefusedError("old", f"a record of {member.island} that is older than one seen before")


def sign_withdrawal(key: IslandKey, run: str, member: Member, time_ms: int) -> Withdrawal:
    body = f"{time_ms}\n{member.island}\n{member.incarnation}".encode()
    return Withdrawal(
        run=run,
        island=member.island,
        incarnation=member.incarnation,
        key=key.public,
        time=time_ms,
        signature=key.sign(f"{run}/withdrawal", body).hex(),
    )


def check_withdrawal(withdrawal: Withdrawal) -> None:
    """Raise RefusedError unless the holder of its key has signed the withdrawal."""
    body = f"{withdrawal.time}\n{withdrawal.island}\n{withdrawal.incarnation}".encode()
    if not verify(
        withdrawal.key, f"{withdrawal.run}/withdrawal", body, bytes.fromhex(withdrawal.signature)
    ):
        raise RefusedError(
            "record", f"a withdrawal of {withdrawal.island} that the key in it did not sign"
        )


def check_config_text(text: str) -> None:
    """Raise InputError when the text is too long for the swarm, or has characters that no YAML file
    has.
    """
    if (size := len(text.encode())) > MAX_CONFIG_BYTES:
        raise InputError(
            f"the run's config is {size} bytes of YAML, at most {MAX_CONFIG_BYTES} can be published"
        )
    if (found := CONTROL_CHARACTERS.search(text)) is not None:
        raise InputError(
            f"the run's config has the control character {found[0]!r}, which a YAML file must not "
            "have"
        )
