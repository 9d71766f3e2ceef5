"""Windows cut into micro-batches, and where documents lie in them."""

import numpy as np
import torch

from inner.data.micro_batch import Cutter
from inner.parallel.context.build import rank_positions

EOS = 0
WINDOWS = torch.tensor([[1, EOS, 2, 2, 2, EOS, 9], [EOS, 4, 4, 4, 4, 4, 9]])
"""The documents of the example in `Packing`: a a b b b b, and c d d d d d."""


def test_bounds_are_where_documents_and_sequences_begin():
    packing = Cutter(torch.arange(6), 6, EOS)(WINDOWS).packing
    assert packing is not None
    assert packing.bounds_N.tolist() == packing.host_bounds_N.tolist() == [0, 2, 6, 7, 12]
    assert packing.bounds_N.dtype == torch.int32
    assert packing.longest == 5


def test_a_rank_with_some_positions_has_their_bounds_and_knows_all_documents():
    positions = torch.tensor([0, 1, 4, 5])
    batch = Cutter(positions, 6, EOS)(WINDOWS)
    assert batch.packing is not None
    assert batch.tokens_BS.tolist() == [[1, EOS, 2, EOS], [EOS, 4, 4, 4]]
    assert batch.targets_BS.tolist() == [[EOS, 2, EOS, 9], [4, 4, 4, 9]]
    assert batch.packing.bounds_N.tolist() == [0, 2, 4, 5, 8]
    assert batch.packing.sequences_BT.tolist() == [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]


def test_a_rank_that_exchanges_heads_for_positions_has_the_bounds_of_all():
    positions = rank_positions("ulysses", 6, 2, 1)
    packing = Cutter(positions, 6, EOS, attends_everywhere=True)(WINDOWS).packing
    assert packing is not None
    assert packing.bounds_N.tolist() == [0, 2, 6, 7, 12]
    assert np.array_equal(packing.documents_BS, packing.sequences_BT)
