"""Read a text shard by shard while a thread brings the next shards, so that the training thread
seldom waits.
"""

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
"""Number of shards that stay mapped after they have been read, because the sequences of a step may
lie in two shards."""
NUM_TRIES = 3
POLL_SECONDS = 5.0


class ShardReader:
    """The shards of one text. `ahead`: number of shards that are brought before they are read.
    Close it after use.

    One thread reads. A second thread, which lives until `close`, brings the shard that is being
    read, then expected shards.
    """

    def __init__(
        self, supply: Supply, cache: ShardCache, ahead: int, *, is_shuffled_whole: bool = False
    ) -> None:
        self._supply = supply
        self._cache = cache
        self._ahead = ahead
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
        """Return the number of training tokens that are known so far."""
        return self._supply.index.train_tokens

    @property
    def shard_tokens(self) -> int:
        return self._supply.index.shard_tokens

    def cut(self, seq_len: int, seed: int) -> "StreamedSequences":
        """Return the text cut into sequences. Raises InputError if a shard is not a whole number of
        sequences.
        """
        index = self._supply.index
        if index.shard_tokens % seq_len:
            raise InputError(
                f"data.seq_len: got {seq_len}; shards of {index.shard_tokens} tokens are no whole "
                "number of sequences"
            )
        return StreamedSequences(self, seq_len, seed, is_shuffled_whole=self._is_shuffled_whole)

    def read(self, number: int) -> np.ndarray | None:
        """Wait for a shard and return its ids; None if the text ends before it. Raises InputError
        if the shard cannot be brought.
        """
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
        """Return the number of sequences that are known so far, and whether these are all."""
        return self._supply.index.count_sequences(seq_len), self._supply.index.is_complete

    def count(self, number: int, seq_len: int) -> tuple[int, bool]:
        """Return the number of known sequences, at least to the end of shard `number`, and whether
        these are all.
        """
        index = self._supply.index
        if number >= len(index.shards) and not index.is_complete:
            self.read(number)
        return self.known(seq_len)

    def expect(self, shards: Iterable[int]) -> None:
        """Announce the shards that will be read soon, in order. Only the first 1 + `ahead` of them
        are used.
        """
        nearest = tuple(islice(dict.fromkeys(shards), 1 + self._ahead))
        if not nearest:
            return  # Nothing is announced, so `read` lets the following shards be brought in order.
        with self._changed:
            self._is_told = True
            if nearest != self._expected:
                self._expected = nearest
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread and the supply, and release the shards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(POLL_SECONDS)
        self._supply.close()
        for shard in self._open.values():
            shard.close()
        self._open.clear()

    def _wait_for(self, number: int) -> None:
        self._demand = number
        self._failure = None
        self._changed.notify_all()
        while self._demand is not None and self._failure is None:
            assert self._thread.is_alive(), "the thread must live until close"
            self._changed.wait(POLL_SECONDS)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (number := self._next()) is not None:
            failure = None
            try:
                shard = self._bring(number)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that reads
                shard = None
                failure = error
            with self._changed:
                self._take(number, shard, failure)

    def _next(self) -> int | None:
        """Wait until there is a shard to bring, and return its number; None after `close`."""
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
            # Another process may have deleted the file since it was brought.
            if (
                shard := self._cache.open(path, index.dtype, index.shards[number].sha256)
            ) is not None:
                check_ids(shard.ids, index, path)
                return shard
        raise InputError(
            f"{self._supply.folder}: shard {number} was written {NUM_TRIES} times, and each time "
            "deleted or damaged before it could be read; check the disk, raise "
            "island.shards.cache_gb, or give each island an island.cache_dir of its own"
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
                log.warning(
                    "shard %d could not be fetched or tokenised ahead of time: %s", number, failure
                )
        self._drop_oldest()
        self._changed.notify_all()

    def _drop_oldest(self) -> None:
        """Release the shards that were read before the last NUM_IN_USE ones and are not
        expected.
        """
        if self._is_shuffled_whole:
            return
        for number in [n for n in self._open if n not in self._expected and n != self._demand]:
            if len(self._open) <= NUM_IN_USE + self._ahead:
                return
            self._open.pop(number).close()


class StreamedSequences:
    """The sequences of a text in shards. It implements the Protocol Sequences of
    inner/data/mixture.py.
    """

    def __init__(
        self, reader: ShardReader, seq_len: int, seed: int, *, is_shuffled_whole: bool
    ) -> None:
        self._reader = reader
        self._seq_len = seq_len
        self._per_shard = reader.shard_tokens // seq_len
        self._by_shards = ShardOrder(self, seed, self._per_shard)
        self.order: OneOrder = (
            SequenceOrder(self.number or 1, seed) if is_shuffled_whole else self._by_shards
        )

    @property
    def number(self) -> int | None:
        known, is_all = self._reader.known(self._seq_len)
        return known if is_all else None

    def window(self, index: int) -> np.ndarray:
        shard, place = divmod(index, self._per_shard)
        ids = self._reader.read(shard)
        assert ids is not None, "the order must name existing sequences only"
        return ids[place * self._seq_len : (place + 1) * self._seq_len + 1]

    def expect(self, positions: Iterable[range]) -> None:
        number = self.number
        ends = ((run.start, run.stop - 1) for run in positions if run)
        self._reader.expect(
            shard
            for first, last in ends
            for shard in range(
                self._by_shards.shard_of(first, number), self._by_shards.shard_of(last, number) + 1
            )
        )

    def count_through(self, shard: int) -> tuple[int, bool]:
        return self._reader.count(shard, self._seq_len)
