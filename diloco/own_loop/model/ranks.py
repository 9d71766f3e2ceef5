"""The ranks of one island whose processes were started by another program."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from diloco.errors import ConfigError
from outer.space.ranks import RankGroup

T = TypeVar("T")
GROUP_SECONDS = 1800.0
"""Time limit of collectives among the ranks. Waits for other islands have their own deadlines."""
WHOLE_MODEL = (
    "Ranks may hold different parameters (stages of a pipeline), shards (FSDP2, tensor or expert "
    "parallel by DTensors) or equal copies (DDP), under the names of the whole model: number the "
    "layers of a stage as in the whole model, shard by DTensors, and begin from equal copies"
)
"""Part of an error message about what the ranks of an island must hold."""


def find_ranks() -> RankGroup:
    """Return all ranks of torch.distributed as one island; without torch.distributed, this process
    alone.

    Every rank must call it. Raises ConfigError if several processes were started and
    torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {size} and torch.distributed is not initialised: all {size} ranks "
                "would become islands of one name; call torch.distributed.init_process_group (or "
                "wrap the model) before Islands"
            )
        return RankGroup()
    if dist.get_world_size() == 1:
        return RankGroup()
    timeout = timedelta(seconds=GROUP_SECONDS)
    group, background = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    assert not isinstance(group, int) and not isinstance(background, int), (
        "every rank is in the group of all ranks"
    )
    return RankGroup(group, background)


def on_every_rank(ranks: RankGroup, work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank. If it raises ConfigError on any rank, raise that on
    all of them, because the others would wait for it. Every rank must call it.
    """
    result: list[T] = []
    problem = ""
    try:
        result.append(work())
    except ConfigError as error:
        problem = str(error)
    for rank, text in enumerate(ranks.gather(problem)):
        if text:
            where = f"rank {rank} of this island: " if ranks.num_ranks > 1 else ""
            raise ConfigError(where + text)
    return result[0]


def count_step(
    ranks: RankGroup, tokens: int, loss: float | torch.Tensor | None, most: int | None
) -> tuple[int, float | None]:
    """Return the tokens of a step over all ranks, and the loss of the first rank that gives one.

    Every rank must call it. Raises ValueError if the tokens are invalid. `most` None: no upper
    limit.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise ValueError(
            f"tokens: got {tokens!r}; it is the number of tokens of the step's batches, as an int"
        )
    loss = loss.item() if isinstance(loss, torch.Tensor) else loss
    by_rank: list[tuple[int, float | None]] = ranks.gather((tokens, loss))
    total = sum(tokens for tokens, _ in by_rank)
    if most is not None and total > most:
        raise ValueError(
            f"the step was on {total} tokens, more than optimizer.tokens_per_step={most}: other "
            "islands refuse that; on all islands, set it to the most tokens of a step on any "
            "island"
        )
    return total, next((loss for _, loss in by_rank if loss is not None), None)
