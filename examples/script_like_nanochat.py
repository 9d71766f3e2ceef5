"""Islands in a training script of the shape of nanochat's: its loop counts steps and sets the
learning rate.

It has what matters here: embeddings in bfloat16, and one optimizer that is Muon for matrices and
AdamW for the rest. The lines of islands are marked.

python examples/script_like_nanochat.py island.index=0 island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path

import torch
from small_llama import build_llama, read_windows, unit_of_windows

import diloco  # islands


class MuonAdamW(torch.optim.Optimizer):
    def __init__(self, matrices: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        self.parts = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self) -> None:
        for part in self.parts:
            part.step()


def lr_multiplier(step: int) -> float:
    return min(1.0, (step + 1) / 20)


num_iterations = 100
index = int(next((word.split("=")[1] for word in sys.argv if word.startswith("island.index=")), 0))
windows = read_windows()[index % 2 :: 2]  # islands: each has its own text
model = build_llama()
embedding = model.get_input_embeddings().to(torch.bfloat16)
embedding.register_forward_hook(lambda module, inputs, output: output.float())
matrices = [
    param for name, param in model.named_parameters() if param.ndim == 2 and "layers" in name
]
others = [
    param for name, param in model.named_parameters() if not (param.ndim == 2 and "layers" in name)
]
optimizer = MuonAdamW(matrices, others)
for group in optimizer.param_groups:
    group["initial_lr"] = group["lr"]
overrides = ["name=like-nanochat", "island.masters=true", *sys.argv[1:]]  # islands
islands = diloco.Islands(
    Path(__file__).with_name("run.yaml"), model, optimizer, overrides
)  # islands
step = islands.steps  # islands: in place of 0
while step < num_iterations and not islands.is_over:  # islands: is_over
    batch = unit_of_windows(windows, step)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lr_multiplier(step)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    islands.step(tokens=batch.numel(), loss=loss)  # islands
    step = islands.steps  # islands: in place of step += 1
print(f"the run is over, digest {islands.digest}")
