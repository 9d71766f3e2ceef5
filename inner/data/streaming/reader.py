"""Reads a text shard by shard, while a thread brings the next ones: the training thread should find each one here."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import numpy as np

from inner.data.mixture import OneOrder, SequenceOrder, ShardOrder
from inner.data.streaming.cache import OpenShard, ShardCache
from inner.data.streaming.index import check_ids, shard_name
from inner.data.streaming.supply import Supply
from inner.errors import InputError

log = logging.getLogger(__name__)

NUM_IN_USE = 2
"""Shards that stay mapped after they have been read: the sequences of a step may lie in two."""
NUM_TRIES = 3
POLL_SECONDS = 5.0


class ShardReader:
    """The shards of one text. `ahead`: how many are brought before they are read. Close it after use.

    One thread reads. A second one, which lives until `close`, brings what is read now and then what is expected.
    """

    def __init__(self, supply: Supply, cache: ShardCache, ahead: int, *, is_shuffled_whole: bool = False) -> None:
        self._supply, self._cache, self._ahead = supply, cache, ahead
        self._is_shuffled_whole = is_shuffled_whole
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._demand: int | None = None
        self._expected: tuple[int, ...] = ()
        self._is_told = False
        self._not_ahead: set[int] = set()
        """Shards that could not be brought ahead. They are tried again when they are read."""
        self._failure: Exception | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="shards", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Training tokens that are known so far."""
        return self._supply.index.train_tokens

    @property
    def shard_tokens(self) -> int:
        return self._supply.index.shard_tokens

    def cut(self, seq_len: int, seed: int) -> "StreamedSequences":
        """The text in sequences. Raises InputError if they do not fill the shards."""
        index = self._supply.index
        if index.shard_tokens % seq_len:
            raise InputError(
                f"data.seq_len: got {seq_len}; shards of {index.shard_tokens} tokens hold no whole number of them"
            )
        return StreamedSequences(self, seq_len, seed, is_shuffled_whole=self._is_shuffled_whole)

    def read(self, number: int) -> np.ndarray | None:
        """The ids of a shard; None if the text ends before it. Waits for it. Raises InputError if it does not come."""
        with self._changed:
            if number not in self._open:
                self._wait_for(number)
            if not self._is_told:
                self._expected = tuple(range(number + 1, number + 1 + self._ahead))
                self._changed.notify_all()
            if number not in self._open:
                return None
            self._open.move_to_end(number)
            return self._open[number].ids

    def known(self, seq_len: int) -> tuple[int, bool]:
        """Sequences that are known so far, and whether they are all."""
        return self._supply.index.count_sequences(seq_len), self._supply.index.is_complete

    def count(self, number: int, seq_len: int) -> tuple[int, bool]:
        """Sequences that are known, at least to the end of shard `number`, and whether they are all."""
        index = self._supply.index
        if number >= len(index.shards) and not index.is_complete:
            self.read(number)
        return self.known(seq_len)

    def expect(self, shards: Iterable[int]) -> None:
        """Say which shards will be read soon, in order; the first and `ahead` more are looked at."""
        nearest = tuple(islice(dict.fromkeys(shards), 1 + self._ahead))
        if not nearest:
            return  # nobody knows: the next ones are brought, in their order
        with self._changed:
            self._is_told = True
            if nearest != self._expected:
                self._expected = nearest
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread and what it brings shards with, and give the shards free."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(POLL_SECONDS)
        self._supply.close()
        for shard in self._open.values():
            shard.close()
        self._open.clear()

    def _wait_for(self, number: int) -> None:
        self._demand, self._failure = number, None
        self._changed.notify_all()
        while self._demand is not None and self._failure is None:
            assert self._thread.is_alive(), "it lives until close"
            self._changed.wait(POLL_SECONDS)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (number := self._next()) is not None:
            failure = None
            try:
                shard = self._bring(number)
            except Exception as error:  # noqa: BLE001 - it is raised in the thread that reads
                shard, failure = None, error
            with self._changed:
                self._take(number, shard, failure)

    def _next(self) -> int | None:
        """The shard to bring next, once there is one; None after `close`."""
        with self._changed:
            while not self._is_closed:
                if self._demand is not None and self._failure is None:
                    return self._demand
                for number in self._expected:
                    if number not in self._open and number not in self._not_ahead:
                        return number
                self._changed.wait()
        return None

    def _bring(self, number: int) -> OpenShard | None:
        for _ in range(NUM_TRIES):
            self._supply.bring(number)
            index = self._supply.index
            if number >= len(index.shards):
                return None
            path = self._supply.folder / shard_name(number)
            # Another process may have deleted it in between.
            if (shard := self._cache.open(path, index.dtype, index.shards[number].sha256)) is not None:
                check_ids(shard.ids, index, path)
                return shard
        raise InputError(
            f"{self._supply.folder}: shard {number} was here {NUM_TRIES} times and was deleted or damaged before it "
            "could be read; see to the disk, raise island.shards.cache_gb, or give each island an island.cache_dir"
        )

    def _take(self, number: int, shard: OpenShard | None, failure: Exception | None) -> None:
        if shard is not None:
            self._open[number] = shard
        if number == self._demand:
            self._failure = failure
            self._demand = number if failure is not None else None
            self._not_ahead.clear()
        elif shard is None:
            self._not_ahead.add(number)
            if failure is not None:
                log.warning("shard %d could not be brought ahead: %s", number, failure)
        self._drop_oldest()
        self._changed.notify_all()

    def _drop_oldest(self) -> None:
        """Give shards free that were read before the last ones and are not expected."""
        if self._is_shuffled_whole:
            return
        for number in [n for n in self._open if n not in self._expected and n != self._demand]:
            if len(self._open) <= NUM_IN_USE + self._ahead:
                return
            self._open.pop(number).close()


class StreamedSequences:
    """The sequences of a text in shards. The Protocol is in inner/data/mixture.py."""

    def __init__(self, reader: ShardReader, seq_len: int, seed: int, *, is_shuffled_whole: bool) -> None:
        self._reader, self._seq_len = reader, seq_len
        self._per_shard = reader.shard_tokens // seq_len
        self._by_shards = ShardOrder(self, seed, self._per_shard)
        self.order: OneOrder = SequenceOrder(self.number or 1, seed) if is_shuffled_whole else self._by_shards

    @property
    def number(self) -> int | None:
        known, is_all = self._reader.known(self._seq_len)
        return known if is_all else None

    def window(self, index: int) -> np.ndarray:
        shard, place = divmod(index, self._per_shard)
        ids = self._reader.read(shard)
        assert ids is not None, "the order names sequences that there are"
        return ids[place * self._seq_len : (place + 1) * self._seq_len + 1]

    def expect(self, positions: Iterable[range]) -> None:
        number = self.number
        ends = ((run.start, run.stop - 1) for run in positions if run)
        self._reader.expect(
            shard
            for first, last in ends
            for shard in range(self._by_shards.shard_of(first, number), self._by_shards.shard_of(last, number) + 1)
        )

    def count_through(self, shard: int) -> tuple[int, bool]:
        return self._reader.count(shard, self._seq_len)
