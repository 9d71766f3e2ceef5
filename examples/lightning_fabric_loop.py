"""Islands in a loop of Lightning Fabric.

python examples/lightning_fabric_loop.py island.index=0 island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from small_llama import BATCH, build_llama, read_windows

from diloco.own_loop.fabric import IslandsCallback

index = int(next((word.split("=")[1] for word in sys.argv if word.startswith("island.index=")), 0))
callback = IslandsCallback(
    Path(__file__).with_name("run.yaml"), overrides=["name=fabric", *sys.argv[1:]]
)
fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback])
fabric.launch()
model = build_llama()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
loader = fabric.setup_dataloaders(
    torch.utils.data.DataLoader(read_windows()[index % 2 :: 2], BATCH)
)
for batch in callback.until_over(loader):
    loss = model(input_ids=batch, labels=batch).loss
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"the run is over, digest {callback.islands.digest}")
