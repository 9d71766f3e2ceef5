"""Supervised fine-tuning over islands, from configs/chat.yaml as a user runs it."""

import json
import random
import subprocess
import sys
from pathlib import Path

from tests.inner.folders import spread_model, write_folder

ROOT = Path(__file__).parents[2]


def write_conversations(path: Path) -> None:
    """Random words of users, which nobody can predict, and one answer to all."""
    draw = random.Random(0)
    rows = []
    for _ in range(400):
        words = "".join(draw.choices("0123456789abcdef", k=20))
        messages = [
            {"role": "user", "content": words},
            {"role": "assistant", "content": "yes, of course"},
        ]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows))


def test_two_islands_fine_tune_a_folder_on_answers_only(tmp_path: Path) -> None:
    write_conversations(tmp_path / "chat.jsonl")
    folder = write_folder(tmp_path / "weights", spread_model(seq_len=256))
    settings = [
        f"data.paths=[{tmp_path / 'chat.jsonl'}]",
        "data.seq_len=256",
        "data.heldout_fraction=0.1",
    ]
    settings += [
        "model.preset=null",
        f"model.init_from={folder}",
        "optimizer.lr=1e-2",
        "optimizer.tokens_per_step=1024",
    ]
    settings += [
        "optimizer.warmup_steps=0",
        "outer.rounds=6",
        "outer.inner_steps=5",
        "outer.transport=loopback",
    ]
    settings += [
        f"island.run_dir={tmp_path}",
        f"island.cache_dir={tmp_path / 'cache'}",
        "evaluate.tokens=2048",
    ]
    command = [
        sys.executable,
        "-m",
        "diloco",
        "simulate",
        "configs/chat.yaml",
        "--in-process",
        *settings,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    records = map(
        json.loads, (tmp_path / "chat" / "island-0" / "metrics.jsonl").read_text().splitlines()
    )
    losses = [record["loss"] for record in records if record["kind"] == "eval"]
    assert losses[0] > 3.0, "the weights were not made for this"
    assert losses[-1] < 0.5, "users' letters alone have 2.77 nats each"
    assert json.loads((tmp_path / "chat" / "summary.json").read_text())["digests_equal"]
