"""What torch.distributed raises when a rank of the island has ended gets a word of ours; other
errors keep theirs.
"""

import pytest
import torch
import torch.distributed as dist

from outer.errors import PeerLost, RankLost, name_lost_rank
from outer.space.ranks import RankGroup
from tests.harness import run_ranks


def wait_for_a_rank_that_ends(rank: int) -> str:
    group = RankGroup(dist.group.WORLD)
    group.gather(rank)
    if rank == 1:
        dist.destroy_process_group()  # its sockets close, as when the process ends
        return ""
    try:
        for _ in range(1000):
            dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        return f"{type(name_lost_rank(error)).__name__}: {name_lost_rank(error)}"
    return "nothing was raised"


def test_a_rank_that_waits_for_one_that_has_ended_says_so():
    text, _ = run_ranks(wait_for_a_rank_that_ends, 2)
    assert text.startswith(
        "RankLost: another rank of this island has ended, so this one ends, too ("
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), PeerLost("a", "Connection reset by peer"), OSError()]
)
def test_other_errors_keep_their_names(error: Exception):
    assert name_lost_rank(error) is error
    assert not isinstance(error, RankLost)
