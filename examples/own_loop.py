"""Islands in a training loop of one's own: python examples/own_loop.py island.index=0
island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path

import torch
from small_llama import build_llama, read_windows, unit_of_windows

import diloco

model, windows = build_llama(), read_windows()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
islands = diloco.Islands(
    Path(__file__).with_name("run.yaml"), model, optimizer, overrides=sys.argv[1:]
)
for unit in islands.units():
    batch = unit_of_windows(windows, unit)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if report := islands.step(tokens=batch.numel(), loss=loss):
        print(
            f"round {report.round} with {', '.join(report.participants)}: loss {loss.item():.3f}",
            flush=True,
        )
print(f"the run is over, digest {islands.digest}")
