"""`python -m tests.faults.hangs CONFIG`: an island whose rank 1 hangs reading data, before its first restart."""

import os
import sys
import time
from collections.abc import Iterator

from torch import Tensor

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import load_config
from diloco.train import train

STEP = 5


def live(parts: Runtime) -> None:
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        parts.batches = HangingBatches(parts.batches)  # pyright: ignore[reportAttributeAccessIssue]
    life.run(parts)


class HangingBatches:
    """Batches that hang when those of step STEP are read."""

    def __init__(self, batches) -> None:
        self.batches = batches

    def micro_batches(self, step: int, *place: int) -> Iterator[Tensor]:
        if step == STEP:
            sleep_in_the_data()
        return self.batches.micro_batches(step, *place)


def sleep_in_the_data() -> None:
    time.sleep(1000)


train(load_config(sys.argv[1]), 0, live)
# As in the command, because gloo's threads sometimes abort during a normal interpreter shutdown.
os._exit(0)
