"""The topk codec: sends only the largest magnitudes of each chunk, as packed indices and coded
values.
"""

import torch

from outer.codecs.packing.bits import pack_numbers, packed_bytes, unpack_numbers
from outer.codecs.packing.block_scales import num_blocks, rows_of
from outer.codecs.packing.checks import check_payload, flat_fp32, is_finite, non_finite_error
from outer.codecs.packing.topk_values import decode_values, encode_values, selected_bytes
from outer.errors import MessageError

_MAGNITUDE_MASK = 0x7FFFFFFF
_INDEX_BITS = 16
_LAST_INDEX = (1 << _INDEX_BITS) - 1
_COLUMN_KEYS = 8


class TopkCodec:
    """Keeps the `top_k` largest magnitudes of each chunk of `chunk_elements`; the rest is 0. Of
    equal ones the first are kept.

    The chunks are like SparseLoCo's (2508.15706). A shorter last chunk sends `top_k` elements, too,
    or all it has. packing/topk_values.py describes the precision and size of the values; with 32
    bits and top_k = chunk_elements the codec is lossless. Payload: the values, then their indices
    within the chunks, ascending, at log2(chunk_elements) bits each.
    """

    name = "topk"
    is_coarse = True
    gathers = True

    def __init__(self, top_k: int, chunk_elements: int, value_bits: int) -> None:
        assert 1 <= chunk_elements <= _LAST_INDEX + 1, "an index has 16 bits at most"
        self.block_elements = chunk_elements
        self._top_k = min(top_k, chunk_elements)
        self._value_bits = value_bits
        self._index_bits = (chunk_elements - 1).bit_length()

    def num_bytes(self, num_elements: int) -> int:
        """Return the size of the selected values and indices: 0.2266 bits per element for 64 of
        4096 at 2 bits.
        """
        count = self._num_selected(num_elements)
        return selected_bytes(count, self._top_k, self._value_bits) + packed_bytes(
            count, self._index_bits
        )

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        if not is_finite(values):
            raise non_finite_error(values)
        indices = [self._largest(row) for row in rows_of(values, self.block_elements)]
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        encoded, packed_indices = self._split(payload, values.numel())
        in_chunks = torch.cat([index.view(-1) for index in indices])
        selected = values.index_select(0, in_chunks + self._chunk_starts(in_chunks.numel()))
        encode_values(selected, self._top_k, self._value_bits, out=encoded)
        pack_numbers(in_chunks, self._index_bits, out=packed_indices)
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Return 1-D fp32 values. Raises MessageError on a wrong size, bad values, or indices
        not ascending in their chunk.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        encoded, packed_indices = self._split(payload, num_elements)
        count = self._num_selected(num_elements)
        in_chunks = unpack_numbers(packed_indices, self._index_bits, count)
        places = in_chunks + self._chunk_starts(count)
        # If every index is inside its chunk, all places ascend exactly if the places of each chunk
        # ascend.
        outside = (in_chunks >= self.block_elements).any() or (places >= num_elements).any()
        if outside or (places.diff() <= 0).any():
            raise MessageError("topk indices are not ascending inside their chunks")
        values = torch.zeros(num_elements)
        values[places] = decode_values(encoded, count, self._top_k, self._value_bits)
        return values

    def _num_selected(self, num_elements: int) -> int:
        full, rest = divmod(num_elements, self.block_elements)
        return full * self._top_k + min(rest, self._top_k)

    def _split(self, payload: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a payload's coded values and packed indices."""
        end = selected_bytes(self._num_selected(num_elements), self._top_k, self._value_bits)
        return payload[:end], payload[end:]

    def _chunk_starts(self, count: int) -> torch.Tensor:
        """Return the first element of the chunk of each of `count` selected elements, int64."""
        starts = torch.arange(num_blocks(count, self._top_k)) * self.block_elements
        return starts.repeat_interleave(self._top_k)[:count]

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the indices of the largest magnitudes in each row (chunks, elements),
        ascending, int64.
        """
        # A key has the magnitude in its high bits and the index in its low bits. No two keys are
        # equal, so the selection does not depend on the algorithm.
        keys = rows.view(torch.int32).bitwise_and(_MAGNITUDE_MASK).long()
        keys.bitwise_left_shift_(_INDEX_BITS).bitwise_or_(_LAST_INDEX - torch.arange(rows.shape[1]))
        selected = _top(keys, min(self._top_k, rows.shape[1]))
        return selected.bitwise_and_(_LAST_INDEX).neg_().add_(_LAST_INDEX).sort(dim=1).values


def _top(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest keys of each row, in any order. Keys are distinct."""
    num_rows, size = keys.shape
    if size % _COLUMN_KEYS == 0 and count * _COLUMN_KEYS < size:
        # They are in the columns with the largest maxima. Searching only these columns takes a
        # third of the time.
        columns = keys.view(num_rows, _COLUMN_KEYS, size // _COLUMN_KEYS)
        best = columns.amax(1).topk(count, dim=1, sorted=False).indices
        keys = columns.gather(2, best[:, None].expand(-1, _COLUMN_KEYS, -1)).view(
            num_rows, count * _COLUMN_KEYS
        )
    return keys.topk(count, dim=1, sorted=False).values
