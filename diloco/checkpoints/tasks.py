"""`diloco evaluate --tasks`: tasks of EleutherAI's lm-evaluation-harness (`lm-eval`) on an exported
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco.checkpoints.weights import Weights
from diloco.errors import ConfigError
from inner.errors import InputError
from inner.huggingface.save import save_model


@dataclass(frozen=True)
class TaskScore:
    """One figure of one task."""

    task: str
    metric: str
    value: float
    error: float | None
    """Standard error; None if the harness reports none."""


@dataclass(frozen=True)
class TaskRequest:
    """The tasks to evaluate, and the most examples of each."""

    tasks: Sequence[str]
    """Names of tasks or groups, known to the harness or defined in `folder`."""
    folder: Path | None = None
    """A folder with the user's own tasks, as YAML files."""
    limit: int | None = None
    """Most examples per task; None means all."""


def check_harness() -> None:
    """Raise ConfigError if lm-eval or transformers, which an extra installs, is missing."""
    for module, package in (("lm_eval", "lm-eval"), ("transformers", "transformers")):
        if find_spec(module) is None:
            raise ConfigError(f"--tasks needs the package {package}; pip install 'diloco[eval]'")


def evaluate_tasks(
    weights: Weights, request: TaskRequest, device: str, folder: Path
) -> list[TaskScore]:
    """Export the weights into `folder`, and let the harness evaluate them with transformers.

    No code that comes with a task or a model is run. The harness's own tasks fetch their data from
    the Hugging Face hub. Raises InputError if a task is unknown or its data cannot be loaded.
    """
    harness: Any = import_module("lm_eval")
    save_model(weights.tensors, weights.export(), folder)
    manager = find_tasks(request)
    model = {"pretrained": str(folder), "dtype": "float32", "max_length": weights.window}
    options = {"limit": request.limit, "device": device, "batch_size": 1, "log_samples": False}
    try:
        found = harness.simple_evaluate(
            "hf", model, list(request.tasks), task_manager=manager, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"--tasks {','.join(request.tasks)}: {type(error).__name__}: {error}"
        ) from error
    assert found is not None, "there is one process, and its rank is 0"
    return [score for task, figures in found["results"].items() for score in _scores(task, figures)]


def find_tasks(request: TaskRequest) -> Any:
    """Return the harness's TaskManager for all tasks of the request.

    Raises InputError if one is unknown.
    """
    tasks: Any = import_module("lm_eval.tasks")
    if request.folder is not None:
        # Reading the harness's own thousands of tasks takes many seconds, so the folder alone is
        # tried first.
        manager = tasks.TaskManager(include_path=str(request.folder), include_defaults=False)
        if set(request.tasks) <= set(manager.all_tasks):
            return manager
    manager = tasks.TaskManager(
        include_path=None if request.folder is None else str(request.folder)
    )
    if unknown := [name for name in request.tasks if name not in manager.all_tasks]:
        where = (
            f" or in {request.folder}"
            if request.folder
            else "; --task-folder names a folder with own tasks"
        )
        raise InputError(
            f"--tasks: lm-eval has no task {', '.join(unknown)}{where}; `lm-eval ls tasks` lists "
            "all tasks"
        )
    return manager


def _scores(task: str, figures: dict[str, object]) -> list[TaskScore]:
    """Return one score per figure.

    The harness names figures `acc,none`, and their standard errors `acc_stderr,none`.
    """
    scores = []
    for key, value in figures.items():
        metric, _, kind = key.partition(",")
        if not isinstance(value, int | float) or not kind or metric.endswith("_stderr"):
            continue
        error = figures.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric} ({kind})"
        scores.append(
            TaskScore(task, name, float(value), error if isinstance(error, float) else None)
        )
    return scores
