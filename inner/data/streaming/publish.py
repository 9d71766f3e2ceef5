"""Write a text in shards into a store, from which islands read it while it grows. After a kill it
can be continued.
"""

import logging
from collections.abc import Callable

from inner.config import DataConfig
from inner.data.streaming.index import HELDOUT, INDEX, Begin, ShardIndex, sha256_of, shard_name
from inner.data.streaming.make import MadeShard, make_shards, new_index
from inner.data.streaming.store import Store
from inner.errors import InputError

log = logging.getLogger(__name__)

NOTHING_YET = {"shards": (), "heldout": None, "following": Begin(), "is_complete": False}
Report = Callable[[ShardIndex, float | None], None]
"""Called with the index so far, and the share of the text that has been read, or None if that is
unknown."""


def publish(
    config: DataConfig, identity: str, store: Store, processes: int, report: Report
) -> ShardIndex:
    """Write the missing shards of one source into a store. Raises InputError.

    Two processes that write the same text to one place write the same files. If one replaces the
    index by an older one, its next write adds the missing shards again.
    """
    if config.shard_tokens % config.seq_len:
        raise InputError(
            f"data.shard_tokens: got {config.shard_tokens}, which is not a multiple of "
            f"data.seq_len {config.seq_len}; "
            "set it to a multiple"
        )
    index = store.read_index() or new_index(config, identity)
    if index.identity != identity:
        raise InputError(
            f"{store.url}: has the shards of another text, tokenizer or data.shard_tokens (or of "
            "files that have "
            "changed since then); give this text a place of its own, or delete the shards there"
        )
    if index.is_complete:
        return index
    made = make_shards(
        config, index, len(index.shards), processes, lambda share: report(index, share)
    )
    for shard in made:
        _write_shard(store, shard)
        index = index.with_shard(shard.made)
        store.write(INDEX, index.model_dump_json().encode())
        report(index, None)
    index = index.model_copy(update={"is_complete": True})
    store.write(INDEX, index.model_dump_json().encode())
    return index


def repair(
    config: DataConfig, index: ShardIndex, store: Store, processes: int, report: Report
) -> list[str]:
    """Check all files of a text in a store, replace the damaged ones, and return their names."""
    mended = []
    for number in range(len(index.shards)):
        report(index, number / len(index.shards))
        names = [HELDOUT, shard_name(number)] if number == 0 else [shard_name(number)]
        if all(_is_whole(store, index, name, number) for name in names):
            continue
        base = index if number else index.model_copy(update=NOTHING_YET)
        shard = next(make_shards(config, base, number, processes, lambda share: None))
        if (
            shard.made.record.sha256 != index.shards[number].sha256
            or shard.made.heldout != index.heldout
        ):
            raise InputError(
                f"{store.url}/{shard_name(number)}: is damaged, and data.source={config.source} "
                "gives another text; give it the text that was prepared, or prepare the whole text "
                "again in another place"
            )
        _write_shard(store, shard)
        mended += names
    return mended


def _is_whole(store: Store, index: ShardIndex, name: str, number: int) -> bool:
    record = index.heldout if name == HELDOUT else index.shards[number]
    assert record is not None, "a text with shards has a held-out text"
    data = store.read(name, 0, record.tokens * index.item_bytes + 1)
    return data is not None and sha256_of(data) == record.sha256


def _write_shard(store: Store, shard: MadeShard) -> None:
    if shard.heldout_ids is not None:
        store.write(HELDOUT, shard.heldout_ids.tobytes())
    store.write(shard_name(shard.number), shard.ids.tobytes())
