"""`python -m tests.faults.hangs CONFIG`: an island whose rank 1 hangs reading data, before its
first restart.
"""

import os
import sys
import time

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import load_config
from diloco.train import train
from inner.data.batches import IslandBatches, StepBatch

UNIT = 5


def live(parts: Runtime) -> None:
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        parts.batches = HangingBatches(parts.batches)  # pyright: ignore[reportAttributeAccessIssue]
    life.run(parts)


class HangingBatches:
    """Batches that hang when unit UNIT is read."""

    def __init__(self, batches: IslandBatches) -> None:
        self.batches = batches

    def read_step(self, unit: int, *place: int) -> StepBatch:
        if unit == UNIT:
            sleep_in_the_data()
        return self.batches.read_step(unit, *place)


def sleep_in_the_data() -> None:
    time.sleep(1000)


train(load_config(sys.argv[1]), 0, live)
# As in the command, because gloo's threads sometimes abort during a normal interpreter shutdown.
os._exit(0)
