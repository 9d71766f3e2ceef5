"""A run of three stages trains on any mesh like on one process: sequences and steps grow, and
evaluations follow.

Some of up to 4 ranks by default; all of them: pytest tests/parity/test_stages.py -m "slow or not
slow"
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from inner.trainer import Trainer
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, SIZES, build_trainer, relative_error, share, whole_model
from tests.parity.meshes import EOS, LATENT, MANY_HEADS, MIXTURE, ONE, QWEN, TIED, Case, case

STAGES = [(8, 12), (16, 24), (32, 12)]
"""Length and number of sequences of the steps of each stage."""
LONGEST = 32
STEPS_OF_A_STAGE = 5

FEW = [
    case("dp_shard2"),
    case("tp2", micro_batch=6),
    case("cp2", micro_batch=6),
    case("pp2", TIED, schedule="zbv"),
    case("pp2 cp2", schedule="interleaved_1f1b", eos_id=EOS),
    case("cp2", QWEN, micro_batch=6, context="all_gather"),
]
REST = [
    case("pp2", schedule="gpipe"),
    case("pp2", schedule="1f1b"),
    case("pp2 dp_shard2", schedule="breadth_first"),
    case("pp2", schedule="interleaved_zero_bubble"),
    case("pp2", schedule="dualpipev", micro_batch=2),
    case("pp2 tp2", micro_batch=6, schedule="zbv"),
    case("cp2", MANY_HEADS, micro_batch=6, context="ulysses", eos_id=EOS),
    case("cp2 tp2", QWEN, micro_batch=6, recompute="full"),
    case("tp2", TIED, micro_batch=6, sequence_parallel=False),
    case("pp2 dp_shard2", MIXTURE, schedule="zbv", recompute="full"),
    case("dp_shard2 ep2", MIXTURE),
    case("cp2", LATENT, micro_batch=6),
    case("pp2 dp_shard2 cp2 tp2", schedule="interleaved_1f1b"),
    case("dp_shard2", compile=True),
]
CASES = [*FEW, *(pytest.param(other, marks=pytest.mark.slow) for other in REST)]


@dataclass
class StagedLife:
    """What a rank saw of a run of three stages; the weights on rank 0 only."""

    losses: list[float | None]
    heldout: list[tuple[float, int]]
    final: dict[str, Tensor]


def windows(number: int, seq_len: int, num_sequences: int) -> Tensor:
    """Sequences of a step, (num_sequences, seq_len + 1), with a pattern to learn."""
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(0, SIZES.vocab_size, (num_sequences, seq_len + 1), generator=generator)
    drawn[:, 1::2] = drawn[:, 0:-1:2] // 2
    return drawn


def live(rank: int, spread: Case) -> StagedLife:
    """Train five steps in each of three stages on one mesh, and evaluate at the end of each."""
    config = OPTIMIZER.model_copy(update={"clip_norm": None})
    configs = [
        config.model_copy(update={"tokens_per_step": length * number}) for length, number in STAGES
    ]
    lengths = {"seq_len": LONGEST, "first_seq_len": STAGES[0][0]}
    trainer = build_trainer(
        spread.degrees, spread.sizes, configs[0], spread.parallel, **spread.settings, **lengths
    )
    life = StagedLife([], [], {})
    for stage, (length, number) in enumerate(STAGES):
        trainer.enter_stage(length, configs[stage])
        for step in range(STEPS_OF_A_STAGE):
            micro_batches = share(trainer, windows(100 * stage + step, length, number))
            life.losses.append(trainer.step(micro_batches).loss)
        life.heldout.append(evaluate(trainer, windows(1000 + stage, length, 12)))
    final, _ = whole_model(trainer.params)
    life.final = final if rank == 0 else {}
    return life


def evaluate(trainer: Trainer, heldout: Tensor) -> tuple[float, int]:
    return trainer.evaluate(share(trainer, heldout))


@cache
def reference(text: str) -> StagedLife:
    return run_ranks(live, 1, REFERENCES[text])[0]


REFERENCES = {repr(each.reference): each.reference for each in [*FEW, *REST]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("spread", CASES, ids=lambda spread: str(spread))
def test_a_run_of_three_stages_is_that_of_one_process(spread: Case) -> None:
    lives = run_ranks(live, spread.degrees.num_ranks, spread, timeout_seconds=800)
    one = reference(repr(spread.reference))
    assert spread.degrees != ONE or spread.parallel.compile
    for life in lives:
        torch.testing.assert_close(
            torch.tensor(life.losses), torch.tensor(one.losses), rtol=1e-4, atol=0
        )
        for (loss, count), (loss_of_one, count_of_one) in zip(
            life.heldout, one.heldout, strict=True
        ):
            assert count == count_of_one
            assert loss == pytest.approx(loss_of_one, rel=1e-4)
    final = lives[0].final
    assert final.keys() == one.final.keys()
    worst = max(relative_error(values, one.final[name]) for name, values in final.items())
    assert worst < 1e-3
