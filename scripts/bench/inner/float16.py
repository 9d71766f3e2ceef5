"""Train in float16 with and without a loss scale, beside fp32 and bf16: losses, and gradients that
become 0.

    python -m scripts.bench.inner.float16 [--steps N]

A gradient's element underflows if it is 0 in float16 and not in fp32, for the same weights and
text. The text is this repository's documentation, in bytes.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inner.config import OptimizerConfig, ParallelConfig
from inner.mesh import Degrees, IslandMesh
from inner.model.sizes import ModelSizes
from inner.trainer import Trainer, TrainerSettings

ROOT = Path(__file__).parents[3]
SIZES = ModelSizes(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=80, vocab_size=256)
SEQ_LEN = 32
SEQUENCES = 16
EVERY = 50
"""Steps between two comparisons of gradients."""
RUNS = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "fp16": ("float16", 16),
    "fp16 unscaled": ("float16", 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    text = read_text()
    probe = build_trainer("float32", steps)
    print(f"{probe_size(probe):,} parameters, {SEQUENCES * SEQ_LEN} tokens per step, {steps} steps")
    print(
        "run             mean loss of the last 50   overflows   last scale   share that "
        "underflows: mean, largest"
    )
    for name, (dtype, exponent) in RUNS.items():
        print(
            f"{name:14}  {run(build_trainer(dtype, steps, exponent), probe, text, steps)}",
            flush=True,
        )


def read_text() -> Tensor:
    pages = sorted(ROOT.glob("docs/*.md"))
    return torch.frombuffer(
        bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8
    ).long()


def build_trainer(dtype: str, steps: int, exponent: int | None = None) -> Trainer:
    optimizer = OptimizerConfig(lr=2e-3, warmup_steps=50, tokens_per_step=SEQUENCES * SEQ_LEN)
    settings = TrainerSettings(
        device="cpu",
        compute_dtype=dtype,
        micro_batch=SEQUENCES,
        seq_len=SEQ_LEN,
        seed=1,
        total_steps=steps,
    )
    trainer = Trainer(SIZES, optimizer, IslandMesh(Degrees(), "cpu"), ParallelConfig(), settings)
    if trainer.loss_scale is not None and exponent is not None:
        trainer.loss_scale.exponent = exponent
    return trainer


def run(trainer: Trainer, probe: Trainer, text: Tensor, steps: int) -> str:
    """Train, and return a row of the table."""
    losses: list[float] = []
    shares: list[float] = []
    overflows = 0
    for step in range(steps):
        windows = draw_windows(text, step)
        wanted = gradients_of(probe, trainer, windows) if step % EVERY == 0 else None
        seen: list[Tensor] = []
        hook = trainer.optimizers[0].register_step_pre_hook(
            lambda *_, seen=seen: seen.extend(copies(trainer))
        )
        result = trainer.step([windows])
        hook.remove()
        losses.append(result.loss or float("nan"))
        overflows += result.overflows
        if wanted and seen:
            shares.append(underflow_share(seen, wanted))
    last = sum(losses[-50:]) / len(losses[-50:])
    scale = "-" if trainer.loss_scale is None else f"{trainer.loss_scale.value:g}"
    return (
        f"{last:24.4f}   {overflows:9}   {scale:>10}   {sum(shares) / len(shares):.4%}, "
        f"{max(shares):.4%}"
    )


def draw_windows(text: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - SEQ_LEN - 1, (SEQUENCES,), generator=generator)
    return torch.stack([text[start : start + SEQ_LEN + 1] for start in starts.tolist()])


def gradients_of(probe: Trainer, trainer: Trainer, windows: Tensor) -> list[Tensor]:
    """Return the gradients in fp32 at the trainer's weights."""
    for index in range(len(trainer.params.slices)):
        probe.params.write(index, trainer.params.read(index))
    seen: list[Any] = []
    hook = probe.optimizers[0].register_step_pre_hook(lambda *_: seen.extend(copies(probe)))
    probe.step([windows])
    hook.remove()
    return seen


def copies(trainer: Trainer) -> list[Tensor]:
    return [
        param.grad.clone()
        for param in trainer.model_parts[0].parameters()
        if param.grad is not None
    ]


def underflow_share(got: list[Tensor], wanted: list[Tensor]) -> float:
    lost = sum(
        int(((mine == 0) & (exact != 0)).sum()) for mine, exact in zip(got, wanted, strict=True)
    )
    return lost / sum(int((exact != 0).sum()) for exact in wanted)


def probe_size(trainer: Trainer) -> int:
    return sum(param.numel() for param in trainer.model_parts[0].parameters())


if __name__ == "__main__":
    main()
