"""What a DHT node keeps for others has limits, and what is there can be renewed when they are
reached.
"""

import pytest

pytest.importorskip("hivemind")
from hivemind.dht.routing import DHTID
from hivemind.utils.timed_storage import get_dht_time

from outer.membership.dht import node as dht
from outer.membership.dht.node import MAX_VALUE_BYTES, BoundedStorage
from outer.membership.dht.owned_records import MAX_AHEAD_SECONDS
from tests.outer.nets import A, run, swarm

KEY, OTHER = DHTID.generate(b"a"), DHTID.generate(b"b")


def later(seconds: float = 10) -> float:
    return get_dht_time() + seconds


def test_values_that_are_too_large_or_live_too_long_are_not_kept():
    storage = BoundedStorage()
    assert not storage.store(KEY, bytes(MAX_VALUE_BYTES + 1), later())
    assert not storage.store_subkey(KEY, "a", bytes(MAX_VALUE_BYTES + 1), later())
    assert not storage.store(KEY, b"x", later(MAX_AHEAD_SECONDS + 10))
    assert not storage.store_subkey(KEY, "s" * 1000, b"x", later())
    assert len(storage) == 0
    assert storage.store_subkey(KEY, "a", b"x", later()) and storage.store(OTHER, b"x", later())


def test_a_full_storage_takes_nothing_new_and_renews_what_it_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dht, "MAX_STORED_BYTES", 1000)
    storage = BoundedStorage()
    assert storage.store_subkey(KEY, "member", bytes(100), later())
    kept = [storage.store_subkey(OTHER, f"{number}", bytes(100), later()) for number in range(20)]
    assert sum(kept) == 9
    assert storage.store_subkey(KEY, "member", bytes(100), later(20))
    assert not storage.store_subkey(KEY, "new", bytes(100), later())


def test_one_key_does_not_fill_the_storage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dht, "MAX_KEY_BYTES", 500)
    storage = BoundedStorage()
    assert storage.store_subkey(KEY, "member", bytes(100), later())
    kept = [storage.store_subkey(KEY, f"{number}", bytes(100), later()) for number in range(20)]
    assert sum(kept) == 4
    assert storage.store_subkey(KEY, "member", bytes(100), later(20))
    assert storage.store_subkey(OTHER, "member", bytes(100), later())


def test_the_number_of_values_has_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dht, "MAX_ENTRIES", 5)
    storage = BoundedStorage()
    kept = [storage.store_subkey(KEY, f"{number}", b"", later()) for number in range(5)]
    kept += [storage.store(DHTID.generate(bytes([number])), b"", later()) for number in range(5)]
    assert kept == [True] * 5 + [False] * 5


def test_what_has_expired_makes_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dht, "MAX_ENTRIES", 1)
    monkeypatch.setattr(dht, "RECOUNT_SECONDS", 0.0)
    storage = BoundedStorage()
    assert storage.store(KEY, b"", later(0.2))
    assert not storage.store(OTHER, b"", later())
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: later(1))
    assert storage.store(OTHER, b"", later(5))


def test_the_node_of_an_island_has_these_limits():
    async def main() -> None:
        async with swarm("hivemind") as place:
            a = await place.open(A)
            protocol = getattr(a.membership, "_dht").protocol  # noqa: B009 - it is not in the interface
            assert isinstance(protocol.storage, BoundedStorage) and isinstance(
                protocol.cache, BoundedStorage
            )

    run(main())
