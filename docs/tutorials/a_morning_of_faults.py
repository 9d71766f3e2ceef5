# %% [markdown]
# # A run that survives a morning of faults
#
# Four islands as real processes, and a storm: processes are killed, frozen and stopped, steps
# become slow, a payload arrives with a wrong bit. The storm has a seed, so it is the same each
# time. What happens is then read three times: in the records, on the page of the run, and in the
# logbook.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

CONFIG = """
name: morning
model: {preset: 1m, dim: 64, num_layers: 2, ffn_dim: 256}
data: {source: python-stdlib, seq_len: 64, max_tokens: 2000000}
optimizer: {tokens_per_step: 512, warmup_steps: 10}
outer: {rounds: 30, inner_steps: 20, transport: tls, start_islands: 4, codec: int8}
evaluate: {every_rounds: 10, tokens: 8192}
island: {micro_batch: 2, checkpoint: {every_rounds: 2}}
islands: [{}, {}, {}, {}]
"""
folder = Path(tempfile.mkdtemp())
run = folder / "morning"
(folder / "run.yaml").write_text(CONFIG)
DILOCO = [sys.executable, "-m", "diloco"]
storm = ["--storm", "12", "--storm-seed", "11", "--storm-count", "5"]
command = [*DILOCO, "simulate", str(folder / "run.yaml"), f"island.run_dir={folder}", *storm]
done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
assert done.returncode == 0, done.stdout + done.stderr
print(done.stdout[done.stdout.index("Run morning") :])

# %% [markdown]
# The table's last lines say it in short: all rounds were committed, all digests were equal, and of
# the inner steps only those were lost that a killed island had made since the last commit. The
# seconds depend on your machine, and with them which round a fault hits.
#
# ## What was done to it
#
# The launcher notes each fault when it inflicts it, and each end of one.

# %%
faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
begin = min(fault["time"] for fault in faults)
for fault in faults:
    print(f"{fault['time'] - begin:6.1f} s  {fault['text']}")
assert faults

# %% [markdown]
# ## What the islands did
#
# Every island writes a line for each attempt at a round in its `metrics.jsonl`. Drawn over time, a
# dot is a round that this island committed with the others, and a cross a fault. An island that was
# killed or stopped has a gap, and is back once it has taken the others' state. The others go on:
# what a fault costs them is the time in which they find out that somebody is away.
#
# ![Committed rounds of four islands over time, and the faults](../images/morning.png)


# %%
def rounds_of(island):
    lines = (run / island / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "round"]


islands = [f"island-{number}" for number in range(4)]
rounds = {island: rounds_of(island) for island in islands}
first = min(record["time"] for records in rounds.values() for record in records)
figure, panel = plt.subplots(figsize=(8, 3.6), layout="constrained")
for height, island in enumerate(islands):
    committed = [record["time"] - first for record in rounds[island] if record["committed"]]
    hits = [
        fault["time"] - first
        for fault in faults
        if island in fault["islands"] and not fault["is_end"]
    ]
    panel.plot(committed, [height] * len(committed), "o", color="tab:blue", ms=6)
    panel.plot(hits, [height + 0.25] * len(hits), "x", color="tab:red", ms=10, mew=2)
panel.set(
    yticks=range(4), yticklabels=islands, xlabel="seconds since the first commit", ylim=(-0.5, 3.6)
)
panel.grid(axis="x", alpha=0.3)
figure.savefig("morning.png", dpi=90)

# %% [markdown]
# No round has two results. The plan of each round says who took part:

# %%
digests = {}
for records in rounds.values():
    for record in records:
        if record["committed"]:
            digests.setdefault(record["round"], set()).add(record["digest"])
assert len(digests) == 30 and all(len(found) == 1 for found in digests.values())
longest = max(rounds.values(), key=len)
counts = [len(record["participants"]) for record in longest if record["committed"]]
print("islands in each committed round:", *counts)
aborted = [record for record in longest if not record["committed"]]
for record in aborted:
    print(f"round {record['round']}, attempt {record['attempt']} was aborted: {record['cause']}")
print(f"{len(digests)} rounds, {len(aborted)} aborted attempts, one digest in each")

# %% [markdown]
# ## The page
#
# `diloco watch runs/morning` serves a page of a run, during it or afterwards: who is there, losses,
# what each island did when, the causes of aborted attempts, faults and the logbook ([a page of the
# run](../operating.md#a-page-of-the-run)). `--text` shows the same in a terminal. Read it from the
# top: the state of each island, with the rounds that it committed and aborted; then predicted
# beside measured figures; then the last rounds, with how many took part and who came last.

# %%
watch = subprocess.run(
    [*DILOCO, "watch", str(run), "--text"], capture_output=True, text=True, timeout=120
)
assert watch.returncode == 0, watch.stderr
print("\n".join(line.rstrip() for line in watch.stdout.splitlines()))

# %% [markdown]
# ## The logbook
#
# `LOGBOOK.md` is the run's story in plain text, written by its islands, one line for each event. An
# operator who comes in at noon reads this first. Here without the lines of the beginning:

# %%
lines = (run / "LOGBOOK.md").read_text().splitlines()
story = [
    line
    for line in lines
    if line.startswith("- ") and not any(word in line for word in (" peak: ", " account: "))
]
for line in story[8:]:
    print(line[:160])
assert any(" started again" in line for line in story)

# %% [markdown]
# So what would the operator have had to do? Nothing: nobody was asked. What deserves a look
# afterwards is a line `minority` or `ALONE`, which says that few islands went on alone, and a round
# that was `aborted` again and again with the same name in its cause
# ([complaints](../protocol.md#below-quorum-alone-and-other-complaints)).
#
# Now change something. `--storm-seed 12` is another morning. `outer.quorum=3` forbids that two of
# four go on alone: how much longer does the run take? `--fault freeze:1@round=5,seconds=20` freezes
# an island for longer than the storm does, and [a round survives a
# kill](../tutorials/a_round_survives.py) looks at one kill closely.
