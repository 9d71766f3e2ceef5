"""A run's entries in the DHT: the records of its islands, its config, and the list of runs.

    key              subkey          value
    <run>/members    <island>@key    the island's record, sealed; empty once it has left
    <run>/config     config@key      the run's config as this island knows it, sealed
    diloco/runs      <run>@key       empty

`key` is the island key that has signed the value (outer/membership/dht/owned_records.py).
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import SystemRandom

from hivemind.dht import DHTNode

from outer.errors import DifferingConfigsError, InputError, MessageError
from outer.identity.island_key import SIGNATURE_BYTES
from outer.membership.base import Member
from outer.membership.dht.node import MAX_VALUE_BYTES
from outer.membership.dht.owned_records import make_subkey, parse_subkey
from outer.membership.records import (
    MAX_CONFIG_BYTES,
    MAX_RECORD_BYTES,
    RUNS_KEY,
    check_record,
    parse_record,
)
from outer.network.rejections import RefusedError
from outer.network.run_key import SEAL_BYTES, PeerAuth, RunKey, seal, unseal

log = logging.getLogger(__name__)

CONFIG_NAME = "config"
MAX_LISTED_RUNS = 64


@dataclass(frozen=True)
class DhtValue:
    """A value in the DHT that its owner has signed."""

    name: str
    owner: str
    value: bytes
    expires_at: float
    """Time in seconds on the DHT's clock."""


@dataclass(frozen=True)
class DhtRecord:
    """An island's record, published by the island itself."""

    member: Member
    expires_at: float


async def store_record(
    dht: DHTNode, run_id: str, auth: PeerAuth, island: str, body: bytes, expires_at: float
) -> None:
    """Store an island's own record. Raises InputError if the record is too long for the nodes to
    store it.
    """
    sealed = seal(auth.key, _member_purpose(run_id, island), body)
    if (size := len(sealed) + SIGNATURE_BYTES) > MAX_VALUE_BYTES:
        raise InputError(
            f"island.ranks: the record of {island!r} with the addresses of all its ranks is {size} "
            f"bytes long, at most {MAX_VALUE_BYTES} are allowed in hivemind's DHT; use fewer "
            "ranks, or outer.transport=gloo"
        )
    await dht.store(
        _members_key(run_id), sealed, expires_at, subkey=make_subkey(island, auth.island)
    )


async def store_config(
    dht: DHTNode, run_id: str, auth: PeerAuth, text: str, expires_at: float
) -> None:
    sealed = seal(auth.key, _config_key(run_id), text.encode())
    await dht.store(
        _config_key(run_id), sealed, expires_at, subkey=make_subkey(CONFIG_NAME, auth.island)
    )
    await dht.store(RUNS_KEY, b"", expires_at, subkey=make_subkey(run_id, auth.island))


async def find_members(dht: DHTNode, run_id: str, auth: PeerAuth) -> dict[str, Member]:
    """Return the records of a run that count, by island. Records of keys that do not own their
    names are left out and counted.

    When several keys claim a name that is not known here, the lowest key gets it, which gives the
    same result everywhere.
    """
    members: dict[str, Member] = {}
    for record in await find_records(dht, run_id, auth.key):
        try:
            check_record(record.member, int(1000 * record.expires_at), auth)
            members[record.member.island] = record.member
        except RefusedError as error:
            auth.rejections.add_error(f"the record of {record.member.island}", error)
    return members


async def find_records(dht: DHTNode, run_id: str, key: RunKey | None) -> list[DhtRecord]:
    """Return all well-formed records of a run that the run key opens, in the order of names and
    keys.
    """
    found: list[DhtRecord] = []
    for value in await _read_values(dht, _members_key(run_id)):
        if len(value.value) <= MAX_RECORD_BYTES:
            with suppress(MessageError):
                member = parse_record(
                    value.name, unseal(key, _member_purpose(run_id, value.name), value.value)
                )
                if member is not None and member.identity == value.owner:
                    found.append(DhtRecord(member, value.expires_at))
    return found


async def read_config(dht: DHTNode, run_id: str, key: RunKey | None, own: str = "") -> str | None:
    """Return the run's config as the island with the public key `own` has published it, otherwise
    as all islands have.

    None if there is no config. Raises InputError when there are configs and the run key opens none
    of them, and DifferingConfigsError if they differ: keys cost nothing, so the number of keys
    behind a config proves nothing.
    """
    texts: dict[str, str] = {}
    refusal: MessageError | None = None
    for value in await _read_values(dht, _config_key(run_id)):
        if value.name != CONFIG_NAME or len(value.value) > MAX_CONFIG_BYTES + SEAL_BYTES:
            continue
        try:
            texts[value.owner] = unseal(key, _config_key(run_id), value.value).decode()
        except UnicodeDecodeError:
            continue
        except MessageError as error:
            refusal = error
    if refusal is not None and not texts:
        raise InputError(
            f"island.run_key_file: the swarm has a config of run {run_id!r}, but {refusal}; every "
            "island of a run "
            "holds the same key, and a run without a key is another run: give it another name"
        )
    if own not in texts and len(set(texts.values())) > 1:
        raise _differing_configs_error(run_id, texts)
    return texts.get(own) or next(iter(texts.values()), None)


def _differing_configs_error(run_id: str, texts: Mapping[str, str]) -> DifferingConfigsError:
    """Build the error for differing configs. `texts`: by the key that has published them."""
    keys_of: dict[str, list[str]] = {}
    for owner, text in texts.items():
        keys_of.setdefault(text, []).append(owner[:16])
    shown = [f"{keys[0]}... and {len(keys) - 1} more keys" for keys in keys_of.values()]
    return DifferingConfigsError(
        f"the swarm shows {len(keys_of)} different configs of run {run_id!r}, of the keys "
        f"{'; '.join(shown[:4])}: whoever reaches a swarm may publish one if the run has no key. "
        "Ask an operator of the run for its config and start with `diloco train`, or give all "
        "islands island.run_key_file"
    )


async def list_runs(dht: DHTNode) -> list[str]:
    """Return the names of the swarm's runs. If there are more than MAX_LISTED_RUNS, choose at
    random: a run can also be found by its name.
    """
    listed = sorted({value.name for value in await _read_values(dht, RUNS_KEY)})
    if len(listed) <= MAX_LISTED_RUNS:
        return listed
    log.warning(
        "%d runs are listed in this swarm, but only %d are read; name one (--run)",
        len(listed),
        MAX_LISTED_RUNS,
    )
    return sorted(SystemRandom().sample(listed, MAX_LISTED_RUNS))


async def _read_values(dht: DHTNode, key: str) -> list[DhtValue]:
    """Return the signed values under a key, in the order of names and owners."""
    found = await dht.get(key, latest=True)
    if found is None or not isinstance(found.value, dict):
        return []
    values: list[DhtValue] = []
    for subkey, entry in found.value.items():
        if (parsed := parse_subkey(subkey)) is not None and isinstance(entry.value, bytes):
            values.append(DhtValue(*parsed, entry.value, entry.expiration_time))
    return sorted(values, key=lambda value: (value.name, value.owner))


def _members_key(run_id: str) -> str:
    return f"{run_id}/members"


def _member_purpose(run_id: str, island: str) -> str:
    return f"{_members_key(run_id)}/{island}"


def _config_key(run_id: str) -> str:
    return f"{run_id}/config"
