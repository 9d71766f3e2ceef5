"""Open the text of a run that is read shard by shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inner.config import DataConfig
from inner.data.chat.coding import count_learned
from inner.data.corpus import (
    SHARDS,
    TOKENS,
    Corpus,
    Text,
    open_prepared,
    open_tokens,
    text_identity,
)
from inner.data.prepare import explain_write_errors
from inner.data.streaming.cache import ShardCache
from inner.data.streaming.index import FORMAT, HELDOUT, ShardIndex, check_ids
from inner.data.streaming.reader import NUM_IN_USE, ShardReader
from inner.data.streaming.store import Store
from inner.data.streaming.supply import StoreSupply, Supply
from inner.data.streaming.tokeniser import TokeniserSupply
from inner.data.tokenizer import Tokenizer, build_tokenizer
from inner.errors import InputError
from inner.files import make_cache_folder

FOLDER = "shards"
"""Folder in the cache with the shards of all texts."""


@dataclass(frozen=True)
class StreamOptions:
    """How an island reads shards."""

    cache_bytes: int | None
    """Limit of all shards on the island's disk, in bytes."""
    ahead: int
    """Number of shards that are fetched or tokenised before they are read."""
    patience: float
    """Number of seconds without an answer from a store after which the island gives up."""
    command: Sequence[str]
    """Command that starts a process which runs `serve` of worker.py."""


def is_streamed(config: DataConfig) -> bool:
    """Return whether at least a part of the text is read shard by shard."""
    return config.order == "shards" or any(source.source == SHARDS for source in config.sources)


def open_streamed(config: DataConfig, cache_dir: Path, options: StreamOptions) -> Corpus:
    """Open the text of `config`; wait for the first shard of each source. Close it after use.
    Raises InputError.
    """
    entries = [(entry.name, entry.weight) for entry in config.mixture] or [("", 1.0)]
    tokenizer = build_tokenizer(*config.tokenizer_choice)
    cache = open_cache(cache_dir, options)
    texts: list[Text] = []
    try:
        for source, entry in zip(config.sources, entries, strict=True):
            if source.source == TOKENS:
                texts.append(open_tokens(source, tokenizer, entry))
            elif source.source == SHARDS or config.order == "shards":
                texts.append(_open_shards(source, cache, options, tokenizer, entry, len(entries)))
            else:
                texts.append(open_prepared(source, cache_dir, entry))
    except BaseException:
        Corpus(tuple(texts), tokenizer.vocab_size, tokenizer.eos_id).close()
        raise
    shuffled = config.shard_tokens if config.order == "shards" else None
    return Corpus(tuple(texts), tokenizer.vocab_size, tokenizer.eos_id, shuffled)


def open_cache(cache_dir: Path, options: StreamOptions) -> ShardCache:
    """Create the folder below `cache_dir` if needed, and return the cache of all shards in it.
    Raises InputError.
    """
    cache = ShardCache(cache_dir / FOLDER, options.cache_bytes)
    with explain_write_errors(cache.folder):
        make_cache_folder(cache_dir)
        cache.folder.mkdir(exist_ok=True)
    return cache


def _open_shards(
    source: DataConfig,
    cache: ShardCache,
    options: StreamOptions,
    tokenizer: Tokenizer,
    entry: tuple[str, float],
    of: int,
) -> Text:
    """Open one source that is read shard by shard. `of`: number of such sources."""
    supply = build_supply(source, cache, options)
    supply.begin()
    if not supply.index.shards:
        raise InputError(
            f"data.source={source.source}: the text {source.paths} is empty; give more text"
        )
    is_shuffled_whole = source.order == "global"
    reader = ShardReader(supply, cache, options.ahead, is_shuffled_whole=is_shuffled_whole)
    try:
        _check(source, supply.index, tokenizer)
        at_once = len(supply.index.shards) if is_shuffled_whole else NUM_IN_USE + options.ahead + 1
        size = (supply.index.shard_tokens + 1) * supply.index.item_bytes
        cache.require_room(
            at_once * of * size, f"reading {of} sources in shards of {size / 1e6:.3g} MB"
        )
        if is_shuffled_whole:
            for number in range(len(supply.index.shards)):
                reader.read(number)
        heldout = supply.heldout()
        check_ids(heldout, supply.index, supply.folder / HELDOUT)
        return _as_text(reader, supply, heldout, entry)
    except BaseException:
        reader.close()
        raise


def build_supply(
    source: DataConfig, cache: ShardCache, options: StreamOptions
) -> StoreSupply | TokeniserSupply:
    """Return the supply that fetches or makes the shards of one source. Raises InputError."""
    if source.source == SHARDS:
        if len(source.paths) != 1:
            raise InputError(
                f"data.paths: got {source.paths}; data.source=shards reads one folder or URL that "
                "`diloco prepare --into` has written; for several, use a data.mixture"
            )
        return StoreSupply(Store(source.paths[0], options.patience), cache, options.patience)
    return TokeniserSupply(source, shards_identity(source), cache, options.command)


def shards_identity(source: DataConfig) -> str:
    """Return an identity that differs for shards of other texts, tokenizers or lengths."""
    own = [source.max_tokens, source.seq_len] if source.format == "chat" else [source.max_tokens]
    return text_identity(source, ["shards", FORMAT, source.shard_tokens, *own])


def _check(source: DataConfig, index: ShardIndex, tokenizer: Tokenizer) -> None:
    where = f"data.source={source.source} {' '.join(source.paths)}"
    if (index.vocab_size, index.eos_id) != (tokenizer.vocab_size, tokenizer.eos_id):
        raise InputError(
            f"{where}: was written with a tokenizer of {index.vocab_size} ids whose eos is "
            f"{index.eos_id}, and data.tokenizer={source.tokenizer} has {tokenizer.vocab_size} and "
            f"{tokenizer.eos_id}; name the same one"
        )
    if source.order == "shards" and index.shard_tokens != source.shard_tokens:
        raise InputError(
            f"{where}: has shards of {index.shard_tokens} tokens, but data.shard_tokens is "
            f"{source.shard_tokens}, "
            f"which would change the order; set data.shard_tokens={index.shard_tokens}"
        )
    if source.order == "global" and not index.is_complete:
        raise InputError(
            f"{where}: is still being written, but data.order=global needs the whole text; set "
            "data.order=shards, or wait until `diloco prepare --into` has ended"
        )


def _as_text(
    reader: ShardReader, supply: Supply, heldout: np.ndarray, entry: tuple[str, float]
) -> Text:
    index = supply.index
    assert index.heldout is not None, "there is a shard"
    num_bytes = index.heldout.text_bytes
    if index.is_coded:
        # The loss and text_bytes count the assistant's words only. The bytes are scaled up to all
        # tokens, so that tokens per byte is right for the tokens that the loss counts.
        learned = count_learned(heldout)
        if not learned:
            raise InputError(
                "data.format=chat: the held-out conversations have no message of an assistant; "
                "give more rows"
            )
        num_bytes = round(num_bytes * len(heldout) / learned)
    return Text(reader, heldout, num_bytes, *entry, is_coded=index.is_coded)
