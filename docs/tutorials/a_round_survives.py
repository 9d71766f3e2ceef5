# %% [markdown]
# # A killed island, and how the round survives it
#
# Three islands as real processes. One is killed with SIGKILL in the middle of the run and comes
# back. The records that each island writes tell what happened.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
name: survives
model: {preset: 1m, dim: 64, num_layers: 2, ffn_dim: 256}
data: {source: python-stdlib, seq_len: 64, max_tokens: 2000000}
optimizer: {tokens_per_step: 512, warmup_steps: 10}
outer: {rounds: 30, inner_steps: 20, transport: tls, start_islands: 3, codec: int8}
evaluate: {every_rounds: 30, tokens: 8192}
island: {micro_batch: 2, checkpoint: {every_rounds: 2}}
islands: [{}, {}, {}]
"""
folder = Path(tempfile.mkdtemp())
(folder / "run.yaml").write_text(CONFIG)
command = [
    sys.executable,
    "-m",
    "diloco",
    "simulate",
    str(folder / "run.yaml"),
    f"island.run_dir={folder}",
]
subprocess.run([*command, "--fault", "kill:1@round=5,back=1"], check=True, timeout=280)

# %% [markdown]
# `metrics.jsonl` of each island has a line for every attempt at a round: who took part, whether it
# committed, and the digest of all parameters and of the momentum afterwards.


# %%
def rounds_of(island):
    lines = (folder / "survives" / island / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "round"]


for record in rounds_of("island-0"):
    told = record["digest"][:12] if record["committed"] else f"aborted: {record['cause']}"
    print(
        f"round {record['round']:2}, attempt {record['attempt']}: {len(record['participants'])} "
        f"islands, {told}"
    )

# %% [markdown]
# The plan of a round fixes who takes part. When one of them dies, the attempt is aborted, which
# changes nothing anywhere, and the others try again at once without it. Back again, the island
# loads its checkpoint, sees that the others are ahead, takes their state, and is in the next plan.
# There is no round whose result differs between two islands:

# %%
digests = {}
for island in ("island-0", "island-1", "island-2"):
    for record in rounds_of(island):
        if record["committed"]:
            digests.setdefault(record["round"], set()).add(record["digest"])
alone = [
    record
    for record in rounds_of("island-0")
    if record["committed"] and len(record["participants"]) == 2
]
back = [
    record
    for record in rounds_of("island-1")
    if record["committed"] and record["time"] > alone[-1]["time"]
]
print(
    f"{len(digests)} rounds, {len(alone)} without the killed island, which was in {len(back)} "
    "after it came back"
)
assert all(len(found) == 1 for found in digests.values()) and len(digests) == 30 and alone and back

# %% [markdown]
# Try `--fault freeze:1@round=5,seconds=20`, or `--storm 4` for a storm, and look at the run with
# `diloco watch`. How a round decides is in [the round protocol](../protocol.md).
