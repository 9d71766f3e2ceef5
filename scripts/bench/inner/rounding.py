"""Train with AdamW's moments in fp32, in bf16 with stochastic rounding, and in bf16 rounded to the
nearest: losses.

    python -m scripts.bench.inner.rounding [--steps N] [--beta2 0.999]

Also printed: the sums of all second moments at the end, which stand still where they are rounded to
the nearest.
"""

import argparse
import os
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from inner.config import OptimizerConfig, ParallelConfig
from inner.mesh import Degrees, IslandMesh
from inner.trainer import Trainer, TrainerSettings
from scripts.bench.inner.float16 import SEQ_LEN, SEQUENCES, SIZES, draw_windows, read_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--beta2", type=float, default=0.999)
    given = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    print(
        f"{given.steps} steps of {SEQUENCES * SEQ_LEN} tokens, betas 0.9 {given.beta2}", flush=True
    )
    print("moments             mean loss of the last 50   sum of second moments")
    print(f"fp32                {run('float32', given.steps, given.beta2)}", flush=True)
    print(f"bf16, stochastic    {run('bfloat16', given.steps, given.beta2)}", flush=True)
    with patch("inner.optim.rounded_adamw.round_stochastically", round_to_nearest):
        print(f"bf16, nearest       {run('bfloat16', given.steps, given.beta2)}", flush=True)


def round_to_nearest(exact: Tensor, _: Tensor) -> Tensor:
    return exact.bfloat16()


def run(state_dtype: str, steps: int, beta2: float) -> str:
    """Train, and return a row of the table."""
    tokens = SEQUENCES * SEQ_LEN
    values = {
        "lr": 2e-3,
        "betas": (0.9, beta2),
        "warmup_steps": 50,
        "tokens_per_step": tokens,
        "state_dtype": state_dtype,
    }
    settings = TrainerSettings(
        device="cpu",
        compute_dtype="float32",
        micro_batch=SEQUENCES,
        seq_len=SEQ_LEN,
        seed=1,
        total_steps=steps,
    )
    optimizer = OptimizerConfig.model_validate(values)
    trainer = Trainer(SIZES, optimizer, IslandMesh(Degrees(), "cpu"), ParallelConfig(), settings)
    text = read_text()
    losses = [
        trainer.step([draw_windows(text, step)]).loss or float("nan") for step in range(steps)
    ]
    moments = [state["exp_avg_sq"].double().sum() for state in trainer.optimizers[0].state.values()]
    return f"{sum(losses[-50:]) / 50:24.4f}   {float(sum(moments)):.4g}"


if __name__ == "__main__":
    main()
