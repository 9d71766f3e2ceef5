"""The topk codec: of each chunk only the largest magnitudes, as packed indices and coded values."""

import torch

from outer.codecs.blocks import num_blocks, rows_of
from outer.codecs.checks import checked_payload, flat_fp32, is_finite, non_finite_error
from outer.codecs.packing import pack_numbers, packed_bytes, unpack_numbers
from outer.codecs.picked import decode_picked, encode_picked, picked_bytes
from outer.errors import MessageError

_MAGNITUDE_MASK = 0x7FFFFFFF
_INDEX_BITS = 16
_LAST_INDEX = (1 << _INDEX_BITS) - 1
_GROUP = 8


class TopkCodec:
    """The `top_k` largest magnitudes of each chunk of `chunk_elements`; of equal ones the first. The rest is 0.

    The chunks of SparseLoCo (2508.15706). A last, shorter chunk sends as many, or all that it has. How close the
    values are, and what they cost, is told in picked.py; with 32 bits and top_k = chunk_elements nothing is lost.
    Payload: the values, then the indices in their chunks, ascending, at log2(chunk_elements) bits each.
    """

    name = "topk"

    def __init__(self, top_k: int, chunk_elements: int, value_bits: int) -> None:
        assert 1 <= chunk_elements <= _LAST_INDEX + 1, "an index has 16 bits at most"
        self.block_elements = chunk_elements
        self._top_k = min(top_k, chunk_elements)
        self._value_bits = value_bits
        self._index_bits = (chunk_elements - 1).bit_length()

    def num_bytes(self, num_elements: int) -> int:
        """What the picked values and indices take: 0.2266 bits an element for 64 of 4096 at 2 bits."""
        count = self._num_picked(num_elements)
        return picked_bytes(count, self._top_k, self._value_bits) + packed_bytes(count, self._index_bits)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload of `values`. Raises NonFiniteError."""
        values = flat_fp32(values)
        if not is_finite(values):
            raise non_finite_error(values)
        indices = [self._largest(row) for row in rows_of(values, self.block_elements)]
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        coded, packed = self._split(payload, values.numel())
        in_chunks = torch.cat([index.view(-1) for index in indices])
        picked = values.index_select(0, in_chunks + self._chunk_starts(in_chunks.numel()))
        encode_picked(picked, self._top_k, self._value_bits, out=coded)
        pack_numbers(in_chunks, self._index_bits, out=packed)
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """1-D fp32 values. Raises MessageError on a wrong size, bad values, or indices not ascending in their chunk."""
        payload = checked_payload(payload, self.num_bytes(num_elements), self.name)
        coded, packed = self._split(payload, num_elements)
        count = self._num_picked(num_elements)
        in_chunks = unpack_numbers(packed, self._index_bits, count)
        places = in_chunks + self._chunk_starts(count)
        # With every index inside its chunk, all places ascend exactly where each chunk's do.
        outside = (in_chunks >= self.block_elements).any() or (places >= num_elements).any()
        if outside or (places.diff() <= 0).any():
            raise MessageError("topk indices are not ascending inside their chunks")
        values = torch.zeros(num_elements)
        values[places] = decode_picked(coded, count, self._top_k, self._value_bits)
        return values

    def _num_picked(self, num_elements: int) -> int:
        full, rest = divmod(num_elements, self.block_elements)
        return full * self._top_k + min(rest, self._top_k)

    def _split(self, payload: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a payload's coded values and packed indices."""
        end = picked_bytes(self._num_picked(num_elements), self._top_k, self._value_bits)
        return payload[:end], payload[end:]

    def _chunk_starts(self, count: int) -> torch.Tensor:
        """The first element of the chunk that each of `count` picked elements lies in; int64."""
        starts = torch.arange(num_blocks(count, self._top_k)) * self.block_elements
        return starts.repeat_interleave(self._top_k)[:count]

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        """The indices in each row (chunks x elements) of its largest magnitudes, ascending; int64."""
        # Magnitude above, index below: no two keys are equal, so what is picked depends on no algorithm.
        keys = rows.view(torch.int32).bitwise_and(_MAGNITUDE_MASK).long()
        keys.bitwise_left_shift_(_INDEX_BITS).bitwise_or_(_LAST_INDEX - torch.arange(rows.shape[1]))
        picked = _top(keys, min(self._top_k, rows.shape[1]))
        return picked.bitwise_and_(_LAST_INDEX).neg_().add_(_LAST_INDEX).sort(dim=1).values


def _top(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row's keys, all different, in any order."""
    num_rows, size = keys.shape
    if size % _GROUP == 0 and count * _GROUP < size:
        # They lie in the groups with the largest maxima: to look there alone takes a third of the time.
        groups = keys.view(num_rows, _GROUP, size // _GROUP)
        best = groups.amax(1).topk(count, dim=1, sorted=False).indices
        keys = groups.gather(2, best[:, None].expand(-1, _GROUP, -1)).view(num_rows, count * _GROUP)
    return keys.topk(count, dim=1, sorted=False).values
