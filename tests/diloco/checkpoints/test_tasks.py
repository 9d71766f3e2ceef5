"""`diloco evaluate --tasks` on a task that the test makes: a model is asked which of two texts is
likelier.

pip install 'diloco[eval]', then pytest -m slow tests/diloco/checkpoints/test_tasks.py
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor, tensor
from typer.testing import CliRunner

from diloco.checkpoints.tasks import check_harness
from diloco.cli.main import app
from diloco.errors import ConfigError
from inner.model.transformer import Transformer
from tests.inner.folders import spread_model, write_folder
from tests.swarm import swarm

QUESTIONS = [
    ("The sky is", " blue", " qqq"),
    ("Two and two make", " four", " zzzzz"),
    ("a", " b", " c"),
] * 3
TASK = """
task: likelier
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    lines = [
        json.dumps({"question": question, "choices": choices}) for question, *choices in QUESTIONS
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "tasks" / "likelier.yaml").write_text(
        TASK.replace("FILE", str(tmp_path / "questions.jsonl"))
    )
    return tmp_path / "tasks"


def test_without_the_extra_the_cure_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # As if it were not installed.
    with pytest.raises(
        ConfigError, match=r"--tasks needs the package lm-eval; pip install 'diloco\[eval\]'"
    ):
        check_harness()


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without a network."""
    places = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "diloco", "evaluate", *arguments, "--device", "cpu"]
    return subprocess.run(
        command, env=os.environ | places, capture_output=True, text=True, timeout=300
    )


def expected_accuracy(model: Transformer) -> float:
    """Share of questions whose first answer is the likelier one, by the model's own logits."""

    def log_likelihood(question: str, answer: str) -> float:
        asked, both = list(question.encode()), list((question + answer).encode())
        log_probs: Tensor = F.log_softmax(model(tensor([both])), dim=-1)[0]
        return sum(float(log_probs[at - 1, both[at]]) for at in range(len(asked), len(both)))

    right = [
        log_likelihood(question, first) > log_likelihood(question, other)
        for question, first, other in QUESTIONS
    ]
    return sum(right) / len(right)


@pytest.mark.slow
def test_a_task_is_scored_as_by_the_models_own_logits(tmp_path: Path, task_folder: Path):
    pytest.importorskip("lm_eval")
    model = spread_model()
    folder = write_folder(tmp_path / "export", model)
    done = run(tmp_path, str(folder), "--tasks", "likelier", "--task-folder", str(task_folder))
    assert done.returncode == 0, done.stderr
    task, metric, value, *_ = done.stdout.splitlines()[-1].split()
    assert (task, metric) == ("likelier", "acc")
    assert math.isclose(float(value), expected_accuracy(model), abs_tol=1e-4)


@pytest.mark.slow
def test_a_run_is_scored_as_what_is_exported_of_it(tmp_path: Path, task_folder: Path):
    pytest.importorskip("lm_eval")
    with swarm(
        tmp_path, "outer.rounds=2", "island.checkpoint.every_rounds=1", islands=[{}]
    ) as made:
        made.start(0).finish()
    run_dir = tmp_path / "test"
    asked = ("--tasks", "likelier", "--task-folder", str(task_folder))
    assert (
        CliRunner().invoke(app, ["export", str(run_dir), str(tmp_path / "export")]).exit_code == 0
    )
    scores = []
    for folder in (run_dir, tmp_path / "export"):
        done = run(tmp_path, str(folder), *asked)
        assert done.returncode == 0, done.stderr
        scores.append(done.stdout.splitlines()[-1])
    assert scores[0] == scores[1] and scores[0].startswith("likelier")


@pytest.mark.slow
def test_an_unknown_task_is_one_clear_error(tmp_path: Path):
    pytest.importorskip("lm_eval")
    folder = write_folder(tmp_path / "export", spread_model())
    done = run(tmp_path, str(folder), "--tasks", "no_such_task")
    assert done.returncode == 2 and "lm-eval has no task no_such_task" in done.stderr
    assert "Traceback" not in done.stderr
