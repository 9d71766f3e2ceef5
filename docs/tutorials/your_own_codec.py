# %% [markdown]
# # A codec of your own, judged by an experiment
#
# A codec turns a part of a pseudo-gradient into bytes and back. Here you write one in a file of its
# own, let the checks of `diloco.testing` try it, look at what it loses, and then compare it with
# what there is, in an experiment of a minute.

# %%
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import diloco  # finds `outer`, in a checkout and in an installed wheel

from diloco.testing import check_codec
from outer.codecs import build_codec
from outer.config import CodingConfig
from outer.errors import InputError

torch.manual_seed(0)
FOLDER = Path(tempfile.mkdtemp())
sys.path.insert(0, str(FOLDER))

# %% [markdown]
# ## The idea
#
# **Three values per element**: minus s, zero, or s, with one s for a block of 256 elements. Half of
# the elements of a block, the small ones, become zero. The others become s with their sign, and s
# is the magnitude that a quarter of the block exceeds. Five digits of three values fit into a byte,
# because 3 to the power of 5 is 243.
#
# A codec needs three methods. `num_bytes` says the size of a payload before it comes, so that a
# receiver can refuse any other. Equal values must give equal bytes on every machine: sorting does,
# while a sum may round differently.

# %%
CODE = """
import torch

BLOCK = 256
DIGITS = 5                                     # of three values, in a byte
POWERS = torch.tensor([1, 3, 9, 27, 81])


class Ternary:
    block_elements = BLOCK

    def num_bytes(self, num_elements):
        return 4 * num_blocks(num_elements) + -(-num_elements // DIGITS)

    def encode(self, values):
        rows = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        sizes = torch.full((len(rows), 1), BLOCK)
        sizes[-1:] = values.numel() - BLOCK * (len(rows) - 1)
        ordered = rows.abs().sort(dim=1).values    # the padding's zeros come first
        limits = ordered.gather(1, BLOCK - 1 - sizes // 2)
        scales = ordered.gather(1, BLOCK - 1 - sizes // 4)
        digits = 1 + torch.sign(rows) * (rows.abs() > limits)
        digits = digits.flatten()[: values.numel()].to(torch.uint8)
        digits = torch.nn.functional.pad(digits, (0, -len(digits) % DIGITS)).view(-1, DIGITS)
        packed = (digits * POWERS).sum(1).to(torch.uint8)
        return torch.cat([scales.flatten().view(torch.uint8), packed])

    def decode(self, payload, num_elements):
        end = 4 * num_blocks(num_elements)
        scales = payload[:end].view(torch.float32).repeat_interleave(BLOCK)[:num_elements]
        digits = (payload[end:, None].to(torch.int64) // POWERS % 3).flatten()[:num_elements]
        return (digits - 1).to(torch.float32) * scales


def num_blocks(num_elements):
    return -(-num_elements // BLOCK)
"""
(FOLDER / "ternary.py").write_text(CODE)
ternary = importlib.import_module("ternary")
for count in (1, 256, 1_000_000):
    num_bytes = ternary.Ternary().num_bytes(count)
    print(
        f"{count:9,} elements: {num_bytes:9,} bytes, {8 * num_bytes / count:.2f} bits per element"
    )

# %% [markdown]
# ## The checks
#
# `check_codec` tries what a round needs: sizes, zeros that stay zeros, the largest numbers of fp32,
# equal bytes for equal values, and any bytes that a peer might send. A run makes the same checks
# before it begins.


# %%
def told(codec):
    try:
        check_codec(codec)
    except InputError as error:
        return str(error)
    return "a codec"


print(told(ternary.Ternary()))

# %% [markdown]
# It passes. (A peer may send a byte of 243 or more, which is no five digits. Our `decode` takes it
# for some digits, and that is allowed, because the values are finite.) Would a mistake be found?
# Two codecs that break a promise:


# %%
class Drifting(ternary.Ternary):
    """It moves each element a little, also those that did not change."""

    def decode(self, payload, num_elements):
        return super().decode(payload, num_elements) + 1e-6


class Longer(ternary.Ternary):
    """It sends a byte more than it says."""

    def encode(self, values):
        return torch.cat([super().encode(values), torch.zeros(1, dtype=torch.uint8)])


for codec in (Drifting(), Longer()):
    print(f"{type(codec).__name__}: {told(codec)}")
    assert told(codec) != "a codec"

# %% [markdown]
# ## What it loses
#
# The error relative to the length of a pseudo-gradient, beside the codecs that there are, on
# elements that are spread as those of a real one: many small ones, few large ones.

# %%
values = torch.randn(100_000) * torch.exp(torch.randn(100_000))
errors = {}
for name in ("int8", "int4", "stat2", "ternary"):
    codec = ternary.Ternary() if name == "ternary" else build_codec(name, CodingConfig())
    payload = codec.encode(values)
    bits = 8 * len(payload) / len(values)
    errors[name] = ((codec.decode(payload, len(values)) - values).norm() / values.norm()).item()
    print(f"{name:8} {bits:5.2f} bits per element, error {100 * errors[name]:5.1f} %")
assert errors["int4"] < errors["ternary"] < 1

# %% [markdown]
# So much error in every round needs **error feedback**: an island keeps what was lost and adds it
# to its next pseudo-gradient ([what a codec does](../tutorials/what_a_codec_does.py) shows why that
# works). In a config it is `outer.coding.feedback`.
#
# ## The experiment
#
# A file says what is compared: a config, what all rows share, and the rows. Our codec is named by
# its import path. Each row trains the same model of 74k parameters on the same tokens, on four
# islands.

# %%
EXPERIMENT = """
name: ternary
about: Three values per element beside bf16. Four islands, 74k parameters.
base:
  model: {dim: 64, num_layers: 1, num_heads: 4, num_kv_heads: 4, ffn_dim: 128}
  data: {source: python-stdlib, seq_len: 64, max_tokens: 2000000}
  optimizer: {lr: 1.0e-2, tokens_per_step: 1024, warmup_steps: 20, schedule: cosine}
  outer: {inner_steps: 10, transport: gloo, start_islands: 4,
    optimizer: {lr: 0.7, momentum: 0.9, nesterov: true}}
  evaluate: {every_rounds: 5, tokens: 8192}
  island: {micro_batch: 4}
overrides: {islands: 4, step_tokens: 1024, tokens: 51200, steps_multiple_of: 10}
axes:
  - - {outer.codec: bf16}
    - {outer.codec: "ternary:Ternary", outer.coding.feedback: 0.95}
seeds: [0]
report: {link: 20mbit, rtt: 50ms}
"""
file = FOLDER / "experiment.yaml"
file.write_text(EXPERIMENT)
command = [
    sys.executable,
    "-m",
    "diloco",
    "experiment",
    str(file),
    "--at-once",
    "1",
    "--out",
    str(FOLDER / "out"),
]
environment = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
}
done = subprocess.run(
    command, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=1200
)
assert done.returncode == 0, done.stdout + done.stderr
summary = (FOLDER / "out" / "summary.md").read_text()
rows = [line for line in summary.splitlines() if line.startswith("|")]
print("\n".join(rows))

# %% [markdown]
# Read it in this order. **Bytes:** an island sends a part of what bf16 sends, a little more than
# 1.73/16 of it: norms, biases and tensors under 4096 elements are sent in 8 bits, because they
# would suffer most. **Loss:** this is one seed and fifty steps, and another seed changes losses by
# some percent. So the table shows that the codec trains, and not which is best. Give it `seeds: [0,
# 1, 2]` and 20 tokens per parameter before you believe more ([experiments](../experiments.md)).
#
# ![Held-out loss against the bytes that an island has sent, for the rows of the
# experiment](../images/own_codec.png)


# %%
def last_two(row):
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    return cells[0], float(cells[2]), cells[5]


UNITS = {"kB": 1e3, "MB": 1e6}
figure, panel = plt.subplots(figsize=(8, 4.2), layout="constrained")
found = {}
for row in rows[2:]:
    label, loss, sent = last_two(row)
    number, unit = sent.split()
    found[label] = (float(number) * UNITS[unit], loss)
    panel.plot(*found[label], "o", ms=10, label=label)
panel.set(
    xscale="log",
    xlabel="bytes that an island sends in all",
    ylabel="held-out loss (nats per token)",
)
panel.set_xlim(1e5, 1e8)
panel.grid(alpha=0.3)
panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)
figure.savefig("own_codec.png", dpi=90)
plain, ours = (
    next(value for label, value in found.items() if word in label) for word in ("bf16", "Ternary")
)
print(f"ternary sends 1/{plain[0] / ours[0]:.1f} of the bytes of bf16")
assert ours[0] < plain[0] / 3 and ours[1] < 1.3 * plain[1]

# %% [markdown]
# Now change something. Let the limit be a third of the block instead of half. Let s be the mean of
# what is left, and ask whether it is the same on every machine. Leave the feedback out for longer.
# Once a codec is worth keeping, put it into a file of your own package and name it
# `my_package.codecs:Ternary`: [extending](../extending.md#codec) says what other islands know of
# it.
