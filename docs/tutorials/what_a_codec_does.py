# %% [markdown]
# # What a codec does to a pseudo-gradient
#
# Between islands every byte counts, so pseudo-gradients are encoded: 8, 4 or 2 bits for an element,
# or only the largest elements. This page takes one pseudo-gradient of a real model apart, and shows
# why **error feedback** is needed below 4 bits.

# %%
import torch

import diloco  # finds `outer`, in a checkout and in an installed wheel

from outer.codecs import build_codec
from outer.config import CodingConfig

torch.manual_seed(0)

# %% [markdown]
# A pseudo-gradient: what AdamW moves a small model by in 30 steps. Its elements differ by two
# orders of magnitude.

# %%
model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
before = torch.cat([param.detach().flatten() for param in model.parameters()])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
target = torch.randn(128, 128)
for _ in range(30):
    inputs = torch.randn(64, 128)
    optimizer.zero_grad()
    ((model(inputs) - inputs @ target) ** 2).mean().backward()
    optimizer.step()
after = torch.cat([param.detach().flatten() for param in model.parameters()])
pseudo_gradient = before - after
print(
    f"{len(pseudo_gradient)} elements, of sizes "
    f"{pseudo_gradient.abs().quantile(torch.tensor([0.01, 0.5, 0.99]))}"
)

# %% [markdown]
# Every codec turns it into bytes and back. The error is relative to the pseudo-gradient's length.


# %%
def coded(name, values):
    codec = build_codec(name, CodingConfig())
    payload = codec.encode(values)
    return codec.decode(payload, len(values)).clone(), 8 * len(payload) / len(values)


errors = {}
for name in ("fp32", "bf16", "int8", "int4", "e3m0", "stat2", "topk"):
    decoded, bits = coded(name, pseudo_gradient)
    errors[name] = ((decoded - pseudo_gradient).norm() / pseudo_gradient.norm()).item()
    print(f"{name:6} {bits:6.2f} bits per element, error {100 * errors[name]:7.3f} %")
assert errors["fp32"] == 0 and errors["int8"] < errors["int4"] < errors["stat2"]

# %% [markdown]
# At 2 bits the error is more than a third of the pseudo-gradient's length, in every round again.
# With error feedback an island keeps what was lost and adds it to its next pseudo-gradient. What
# has arrived after many rounds is then the sum of all pseudo-gradients but for the last error.


# %%
def error_after(rounds, feedback):
    arrived, kept = torch.zeros_like(pseudo_gradient), torch.zeros_like(pseudo_gradient)
    for _ in range(rounds):
        wanted = pseudo_gradient + feedback * kept
        sent, _ = coded("stat2", wanted)
        kept = wanted - sent
        arrived += sent
    return ((arrived - rounds * pseudo_gradient).norm() / (rounds * pseudo_gradient).norm()).item()


for rounds in (1, 4, 16, 64):
    print(
        f"{rounds:3} rounds: error {error_after(rounds, 0.0):.3f} without feedback, "
        f"{error_after(rounds, 1.0):.3f} with"
    )
assert error_after(64, 1.0) < 0.2 * error_after(64, 0.0)

# %% [markdown]
# `outer.codec=stat2 outer.coding.feedback=1.0` is this in a run, where the error that is kept
# changes only when a round commits: an aborted attempt must not lose it. [Methods](../methods.md)
# has the published methods that use it.
