"""The outer loop needs as much memory as `diloco plan` says: all tensors are counted while a round
is voted on.
"""

import gc
import threading
from functools import partial

import pytest
import torch

from outer.config import OuterConfig
from outer.cost import memory_bytes
from outer.hooks import NoHooks, Phase
from outer.space.buffers import BUFFERS
from tests.outer.islands import GUARD_SECONDS, Island, Spec, run_islands

torch.set_num_threads(1)

SHAPES = {"embed": (256, 128), **{f"layers.{i}.w": (512, 256) for i in range(4)}}
LOCAL_BYTES = 2 * 4 * (256 * 128 + 4 * 512 * 256)
"""Of the local params, and of the tensors that they were made from, which `run_islands` keeps."""
TOLERANCE = 0.05
WAIT_SECONDS = 20.0
CASES = {
    "fp32": {},
    "without momentum": {"optimizer": {"momentum": 0.0}},
    "bf16": {"codec": "bf16"},
    "int4 with feedback": {"codec": "int4", "coding": {"feedback": 0.9}},
    "last mean": {"merge": {"rule": "centered_clip"}},
    "fragments": {"fragments": 2, "inner_steps": 2},
}


def model() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def put_old_objects_aside() -> None:
    """From now on the collector neither lists nor scans what earlier tests have left, which takes
    long.
    """
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Bytes of all new tensors, free buffers included. Tensors that share memory count once."""
    gc.collect()
    storages = (each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class CountAtTheVote(NoHooks):
    """Counts once in the last round, while all islands have reduced and none has voted."""

    def __init__(self, num_islands: int, last_round: int) -> None:
        self._barrier, self._last_round = threading.Barrier(num_islands), last_round
        self.num_bytes = 0

    def reached(self, phase: Phase, round_number: int) -> None:
        if (phase, round_number) != ("vote", self._last_round) or self.num_bytes:
            return
        try:
            if self._barrier.wait(WAIT_SECONDS) == 0:
                self.num_bytes = live_bytes()
            self._barrier.wait(WAIT_SECONDS)
        except threading.BrokenBarrierError:
            # On a busy machine an attempt may fail, and an island come to a vote alone.
            self._barrier.reset()


def rounds(count: int, island: Island) -> None:
    island.outer.begin()
    for _ in range(count):
        island.round()


@pytest.mark.parametrize("name", CASES)
def test_the_memory_of_a_round_is_what_the_plan_says(name: str) -> None:
    fields = {
        "transport": "loopback",
        "start_islands": 2,
        "part_elements": 8192,
        "wait_seconds": GUARD_SECONDS,
    }
    config = OuterConfig.model_validate({**fields, **CASES[name]})
    specs = tuple(Spec(name, shape) for name, shape in SHAPES.items())
    planned = memory_bytes(config, specs, num_islands=2, num_ranks=1)
    # Loopback needs no memory for what arrives, and few rounds of a coarse codec do not fill what
    # joiners may get.
    planned.pop("payloads that arrive")
    log = planned.pop("means for joiners")
    num_rounds = 5
    BUFFERS.__init__()
    meter = CountAtTheVote(2, num_rounds - 1)
    put_old_objects_aside()
    run_islands(
        dict.fromkeys("ab", partial(rounds, num_rounds)),
        config,
        model=model,
        hooks=dict.fromkeys("ab", meter),
    )
    held = meter.num_bytes / 2 - LOCAL_BYTES
    most = sum(planned.values()) + log
    least = most if name == "fp32" else sum(planned.values())
    assert (1 - TOLERANCE) * least <= held <= (1 + TOLERANCE) * most
