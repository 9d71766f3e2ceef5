"""Islands under the Trainer of Lightning.

python examples/lightning_trainer.py island.index=0 island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from small_llama import BATCH, build_llama, read_windows
from torch.utils.data import DataLoader

from diloco.trainers.lightning import IslandsCallback


class Llama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.llama = build_llama()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.llama(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


index = int(next((word.split("=")[1] for word in sys.argv if word.startswith("island.index=")), 0))
callback = IslandsCallback(
    Path(__file__).with_name("run.yaml"),
    overrides=["name=lightning", *sys.argv[1:]],
    tokens=lambda batch: batch.numel(),
)
loader = DataLoader(read_windows()[index % 2 :: 2], BATCH)
Trainer(
    accelerator="cpu",
    devices=1,
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Llama(), loader)
print(f"the run is over, digest {callback.islands.digest}")
