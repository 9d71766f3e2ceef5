# %% [markdown]
# # DiLoCo in 100 lines, and then with this library
#
# Four islands train one small model on the source text of Python. Each makes 20 steps of its own;
# then all average how far they have moved, and an outer optimizer moves the global parameters by
# that mean. That is all of DiLoCo (2311.08105). First by hand, in one process, with nothing but
# torch.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

INNER_STEPS, ROUNDS, ISLANDS, BATCH, LENGTH = 20, 12, 4, 8, 64
torch.manual_seed(0)

# %% [markdown]
# The text, as bytes, and a model that predicts the next byte. What the model is does not matter to
# DiLoCo.

# %%
library = Path(json.__file__).parents[1]
text = torch.tensor(
    list(b"".join((library / f"{name}.py").read_bytes() for name in ("argparse", "ast", "typing")))
)
train, heldout = text[:-8192], text[-8192:]


class Model(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(dim, 256)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def loss_of(model, windows):
    return nn.functional.cross_entropy(
        model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
    )


def some_windows(source, count, generator):
    starts = torch.randint(len(source) - LENGTH - 1, (count,), generator=generator)
    return torch.stack([source[start : start + LENGTH + 1] for start in starts])


def heldout_loss(model):
    with torch.no_grad():
        return loss_of(model, some_windows(heldout, 64, torch.Generator().manual_seed(1))).item()


# %% [markdown]
# Now DiLoCo. An island keeps its own AdamW, with its moments, over all rounds. Its
# **pseudo-gradient** is where the round began minus where the island is now: a direction to
# subtract, as a gradient is. The outer optimizer is SGD with Nesterov momentum on the mean of the
# pseudo-gradients.


# %%
def train_diloco(outer_lr, outer_momentum):
    torch.manual_seed(0)
    model = Model()
    start = [param.detach().clone() for param in model.parameters()]
    islands = [Model() for _ in range(ISLANDS)]
    optimizers = [torch.optim.AdamW(island.parameters(), lr=3e-3) for island in islands]
    readers = [torch.Generator().manual_seed(100 + index) for index in range(ISLANDS)]
    outer = torch.optim.SGD(
        model.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
    )
    bytes_sent = 0
    for _ in range(ROUNDS):
        mean = [torch.zeros_like(param) for param in start]
        for island, optimizer, reader in zip(islands, optimizers, readers, strict=True):
            island.load_state_dict(model.state_dict())
            for _ in range(INNER_STEPS):
                optimizer.zero_grad()
                loss_of(island, some_windows(train, BATCH, reader)).backward()
                optimizer.step()
            for total, before, after in zip(
                mean, model.parameters(), island.parameters(), strict=True
            ):
                total += (before.detach() - after.detach()) / ISLANDS
        for param, pseudo_gradient in zip(model.parameters(), mean, strict=True):
            param.grad = pseudo_gradient
        outer.step()
        bytes_sent += 4 * sum(param.numel() for param in start)
    return heldout_loss(model), bytes_sent


# %% [markdown]
# What it is compared with: data-parallel training on the same tokens, which sends a gradient at
# every step.


# %%
def train_data_parallel():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    readers = [torch.Generator().manual_seed(100 + index) for index in range(ISLANDS)]
    for _ in range(ROUNDS * INNER_STEPS):
        optimizer.zero_grad()
        loss_of(
            model, torch.cat([some_windows(train, BATCH, reader) for reader in readers])
        ).backward()
        optimizer.step()
    return heldout_loss(model), ROUNDS * INNER_STEPS * 4 * sum(
        param.numel() for param in model.parameters()
    )


results = {
    "data-parallel": train_data_parallel(),
    "averaging (outer lr 1, no momentum)": train_diloco(1.0, 0.0),
    "DiLoCo (outer lr 0.7, Nesterov 0.9)": train_diloco(0.7, 0.9),
}
for name, (loss, sent) in results.items():
    print(f"{name:40} held-out loss {loss:.3f}, {sent / 1e6:7.1f} MB of gradients for each island")

# %% [markdown]
# The islands send 20 times less, and are behind: 12 rounds are few. How the gap goes with the
# number of rounds, and which outer optimizer is best for how many, was measured at length:
# [results](../results.md#diloco-at-20-tokens-per-parameter).

# %%
assert results["data-parallel"][1] == 20 * results["averaging (outer lr 1, no momentum)"][1]
assert all(loss < 2.8 for loss, _ in results.values())

# %% [markdown]
# ## With this library
#
# The same as a config. What is new is everything around the loop: islands are processes on
# different machines, they meet, they fail and return, a round commits on all of them or on none,
# and a digest proves that they hold the same bits. `--in-process` runs them as threads here;
# without it they are real processes.

# %%
CONFIG = """
name: tutorial
model: {preset: 1m, dim: 64, num_layers: 2, ffn_dim: 256}
data: {source: python-stdlib, seq_len: 64, max_tokens: 2000000}
optimizer: {lr: 3e-3, tokens_per_step: 512, warmup_steps: 0, schedule: constant}
outer:
  rounds: 12
  inner_steps: 20
  transport: tls
  start_islands: 4
  optimizer: {lr: 1.0, momentum: 0.0, nesterov: false}
evaluate: {every_rounds: 12, tokens: 8192}
islands: [{}, {}, {}, {}]
"""
folder = Path(tempfile.mkdtemp())
(folder / "run.yaml").write_text(CONFIG)
command = [sys.executable, "-m", "diloco", "simulate", str(folder / "run.yaml"), "--in-process"]
subprocess.run([*command, f"island.run_dir={folder}"], check=True, timeout=280)
summary = json.loads((folder / "tutorial" / "summary.json").read_text())
assert summary["digests_equal"] and summary["rounds_committed"] == 12

# %% [markdown]
# Now change something: `outer.inner_steps=5`, `outer.codec=int4`, `--islands 8`,
# `outer.optimizer.momentum=0.9`. Each is one word on the command line. `diloco settings outer`
# lists the others.
