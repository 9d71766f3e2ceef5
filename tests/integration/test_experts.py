"""A mixture of experts in a run of two islands, from the command line to a model that transformers
computes.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco.checkpoints.weights import open_weights
from inner.expert_names import is_router_bias
from inner.measure.param_specs import num_elements, param_specs
from inner.model.single_process import build_whole_model
from inner.model.sizes import PRESETS
from tests.swarm import read_records

ROOT = Path(__file__).parents[2]
DILOCO = [sys.executable, "-m", "diloco"]
ROUNDS = 3


def run(*arguments: str) -> str:
    command = [*DILOCO, *arguments]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of configs/experts.yaml: two processes per island, each with half
    of the experts.
    """
    folder = tmp_path_factory.mktemp("experts")
    run("simulate", "configs/experts.yaml", f"outer.rounds={ROUNDS}", f"island.run_dir={folder}")
    return folder / "experts"


def test_islands_with_expert_parallelism_commit_equal_states_and_learn(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["digests_equal"] is True and summary["rounds_committed"] == ROUNDS
    losses = [
        loss for _, loss in sorted(summary["eval_losses"].items(), key=lambda pair: int(pair[0]))
    ]
    assert losses[-1] < losses[0] - 0.5


def test_records_have_the_load_of_each_layer_and_the_losses_of_its_router(run_dir: Path) -> None:
    for name in ("island-0", "island-1"):
        records = read_records(run_dir / name / "metrics.jsonl")
        steps = [record for record in records if record["kind"] == "step"]
        assert steps and all(set(step["expert_loads"]) == {"1", "2", "3"} for step in steps)
        # Near 1 at balance; biases may bring it a little below.
        assert all(
            step["routing"]["sequence_loss"] > 0.8 and step["routing"]["dropped"] == 0
            for step in steps
        )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert all(load >= 1 for load in summary["expert_loads"].values())


def test_transformers_computes_what_is_exported(run_dir: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    told = run("export", str(run_dir), str(tmp_path / "out"))
    assert f"{num_elements(param_specs(PRESETS['1m-experts'])):,} parameters" in told
    weights = open_weights(run_dir)
    assert any(tensor.any() for name, tensor in weights.tensors.items() if is_router_bias(name))
    ours = build_whole_model(weights.sizes, weights.tensors, 64, "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert float((ours(tokens) - expected).abs().max() / expected.abs().max()) < 1e-5


def test_an_exported_mixture_continues_a_text_as_its_run_does(
    run_dir: Path, tmp_path: Path
) -> None:
    run("export", str(run_dir), str(tmp_path / "out"))
    words = ("--prompt", "def ", "--max-tokens", "12", "--temperature", "0")
    assert run("generate", str(tmp_path / "out"), *words) == run("generate", str(run_dir), *words)


def test_the_run_is_evaluated_as_its_islands_did(run_dir: Path) -> None:
    found = re.search(r"loss +([\d.]+)", run("evaluate", str(run_dir)))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert found is not None
    assert float(found[1]) == pytest.approx(summary["final_eval_loss"], abs=2e-3)
