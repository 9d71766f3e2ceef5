"""Islands that share one GPU, in processes and as threads of one: `pytest -m gpu tests/gpu` on a
machine that has one.

Nothing else is needed: no network and no hivemind. Commands run as processes of their own, so this
one opens nothing on the GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 240.0
"""A guard against hangs. Each command takes less than a minute on one H100."""
TEXT = (
    "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x):\n        "
    "self.x = x\n"
)
CONFIG = """
name: {name}
model: {{dim: 128, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 256}}
data: {{source: files, paths: [{folder}/text], seq_len: 128, heldout_fraction: 0.3}}
optimizer: {{lr: 3e-3, tokens_per_step: 2048, warmup_steps: 0, schedule: constant}}
outer: {{rounds: 6, inner_steps: 3, transport: tls, codec: int8, wait_seconds: 120}}
evaluate: {{tokens: 2048}}
island: {{device: cuda, micro_batch: 4, run_dir: {folder}, cache_dir: {folder}/cache,
  parallel: {{compile: false}}}}
"""

pytestmark = [
    pytest.mark.gpu,
    # It asks the driver and opens nothing on the GPU.
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
]


def diloco(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the program where it sees the machine's first GPU only."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return subprocess.run(
        [sys.executable, "-m", "diloco", *words],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": first, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )


def write_config(folder: Path, name: str) -> str:
    """A config with its text. Returns the path."""
    (folder / "text").mkdir(parents=True)
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 20)
    (folder / "config.yaml").write_text(CONFIG.format(name=name, folder=folder))
    return str(folder / "config.yaml")


def simulate(folder: Path, *words: str) -> tuple[Path, str]:
    """Make a run. Returns its folder and what was printed; fails with the islands' logs."""
    done = diloco("simulate", write_config(folder, "shared"), "--ranks", "1", *words)
    logs = "".join(
        f"\n{path}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("shared/*/log.txt"))
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs
    return folder / "shared", done.stdout


def records(run: Path, island: str, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run / island / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == kind]


def digests(run: Path, island: str) -> dict[int, str]:
    """Digest of each round that the island has committed."""
    return {
        record["round"]: record["digest"]
        for record in records(run, island, "round")
        if record["committed"]
    }


def peak(run: Path, island: str) -> str:
    """What the logbook says that the island's utilisation is relative to."""
    return next(
        line
        for line in (run / "LOGBOOK.md").read_text().splitlines()
        if f"**{island}** peak: " in line
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two islands over tls, each a process, and its data-parallel baseline: all on one
    GPU.
    """
    return simulate(tmp_path_factory.mktemp("pair"), "--islands", "2", "--baseline")


def test_two_islands_on_one_card_hold_the_same_bits_after_every_round(pair):
    run, printed = pair
    assert "2 islands of one rank share 1 GPU:" in printed
    first, second = (digests(run, f"island-{index}") for index in range(2))
    assert sorted(first) == list(range(6)) and first == second
    assert all("2 islands share the GPU" in peak(run, f"island-{index}") for index in range(2)), (
        "they were not on CUDA"
    )


def test_islands_on_one_card_learn_and_evaluate_alike(pair):
    run, _ = pair
    first, second = (
        [record["loss"] for record in records(run, f"island-{index}", "eval")] for index in range(2)
    )
    assert first == pytest.approx(second, rel=1e-3)
    assert first[-1] < first[0] - 0.5


def test_a_run_of_a_shared_card_is_evaluated_on_the_card(pair):
    run, _ = pair
    done = diloco("evaluate", str(run), "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    loss = float(done.stdout.split()[1])
    # The run computed in bf16, this in fp32.
    assert loss == pytest.approx(records(run, "island-0", "eval")[-1]["loss"], rel=0.02)


def test_the_baseline_of_islands_on_one_card_takes_their_batches_on_one_rank(pair):
    run, _ = pair
    steps = records(run, "baseline", "step")
    assert [record["tokens"] for record in steps] == [2 * 2048 * number for number in range(1, 19)]
    assert "measured on cuda:0" in peak(run, "baseline")
    # The first step is from the same weights, on the text of both islands together.
    both = [records(run, f"island-{index}", "step")[0]["loss"] for index in range(2)]
    assert steps[0]["loss"] == pytest.approx(sum(both) / 2, rel=0.01)


def test_an_island_that_is_killed_on_a_shared_card_returns_to_the_others(tmp_path):
    run, _ = simulate(
        tmp_path, "--islands", "3", "--fault", "kill:1@round=2,back=0.5", "outer.quorum=3"
    )
    found = [digests(run, f"island-{index}") for index in range(3)]
    assert sorted(found[0]) == list(range(6)) and found[2] == found[0]
    assert found[1].items() <= found[0].items() and {0, 1, 3, 4, 5} <= set(found[1])
    assert "**island-1** started again: " in (run / "LOGBOOK.md").read_text(), "it was not killed"


def test_compiled_islands_in_one_process_agree_on_cuda(tmp_path):
    run, _ = simulate(tmp_path, "--islands", "2", "--in-process", "island.parallel.compile=true")
    first, second = (digests(run, f"island-{index}") for index in range(2))
    assert sorted(first) == list(range(6)) and first == second
    losses = [record["loss"] for record in records(run, "island-0", "eval")]
    assert losses[-1] < losses[0] - 0.5
    assert "measured on cuda:0" in peak(run, "island-0"), "they were not on CUDA"


def test_the_driver_is_asked_without_opening_a_context_and_says_what_torch_says(tmp_path):
    program = (
        "from diloco.runtime.devices.gpus import find_obstacle, list_cards, list_gpus\n"
        "gpus, cards = list_gpus(), list_cards()\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "named = [(torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n)) for n in "
        "range(len(gpus))]\n"
        "assert named == [(card.name, card.capability) for card in cards], (named, cards)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("setting", "visible", "said"),
    [
        (
            "island.auto=[micro_batch]",
            None,
            "2 islands share one on this machine; set island.micro_batch",
        ),
        ("outer.rounds=6", "77", "CUDA_VISIBLE_DEVICES is '77', which names none of them"),
    ],
)
def test_what_a_shared_or_hidden_card_cannot_do_is_refused_before_a_rank_starts(
    setting, visible, said, tmp_path, monkeypatch
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    done = diloco(
        "simulate", write_config(tmp_path, "refused"), "--islands", "2", "--ranks", "1", setting
    )
    assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stdout + done.stderr
    assert not (tmp_path / "refused").exists()
