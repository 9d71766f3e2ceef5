"""The callback for Lightning's Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="needs the package lightning")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from diloco.errors import ConfigError
from diloco.trainers.lightning import IslandsCallback
from tests.diloco.trainers.small_lightning import Small, StopAt, alone, fit

pytestmark = pytest.mark.slow


def test_islands_whose_first_round_has_not_ended_change_no_bit_of_training(tmp_path: Path) -> None:
    plain = fit(tmp_path, None, StopAt(20), limit_val_batches=0)
    islands = IslandsCallback(alone(tmp_path, inner_steps=1000))
    with_islands = fit(tmp_path, islands, StopAt(20), limit_val_batches=0)
    assert len(plain.losses) == 20
    assert with_islands.losses == plain.losses
    assert with_islands.seen == plain.seen


def test_the_runs_end_stops_the_trainer(tmp_path: Path) -> None:
    islands = IslandsCallback(alone(tmp_path))
    model = fit(tmp_path, islands, accumulate_grad_batches=2, limit_val_batches=0)
    assert islands.islands.is_over
    assert islands.islands.round == 3
    assert len(model.losses) == 12, "two batches are one step"


@pytest.mark.parametrize("delay", [0, 1])
def test_a_trainer_that_resumes_from_its_checkpoint_goes_on_where_it_was(
    tmp_path: Path, delay: int
) -> None:
    whole = IslandsCallback(alone(tmp_path / "whole", delay=delay))
    save = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    settings: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 0}
    fit(tmp_path / "whole", whole, ModelCheckpoint(tmp_path / "whole", **save), **settings)

    broken = IslandsCallback(alone(tmp_path / "broken", delay=delay))
    fit(
        tmp_path / "broken",
        broken,
        ModelCheckpoint(tmp_path / "broken", **save),
        StopAt(4),
        **settings,
    )
    assert broken.islands.digest != whole.islands.digest
    resumed = IslandsCallback(alone(tmp_path / "broken", delay=delay))
    saved = tmp_path / "broken" / "step=3.ckpt"
    fit(
        tmp_path / "broken",
        resumed,
        ModelCheckpoint(tmp_path / "again", **save),
        ckpt_path=saved,
        **settings,
    )
    assert resumed.islands.digest == whole.islands.digest


def test_a_trainer_that_resumes_without_the_state_of_islands_is_refused(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}")
    fit(tmp_path, None, save, StopAt(3), enable_checkpointing=True, limit_val_batches=0)
    islands = IslandsCallback(alone(tmp_path))
    with pytest.raises(
        ConfigError, match=r"resumes at its step 3 without the state of Islands.*without ckpt_path"
    ):
        fit(tmp_path, islands, ckpt_path=tmp_path / "step=3.ckpt")
    assert not (tmp_path / "runs").exists(), "the run was not entered"


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"max_steps": 5}, r"Trainer\(max_steps=...\) is 5, and the run has 6 steps"),
        (
            {"min_steps": 7},
            r"Trainer\(min_steps=7, min_epochs=1\) would train on after the run is over",
        ),
        ({"min_epochs": 2}, r"Trainer\(min_steps=None, min_epochs=2\) would train on"),
    ],
)
def test_limits_that_do_not_fit_the_run_are_refused(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        fit(tmp_path, IslandsCallback(alone(tmp_path)), **settings)


def test_the_global_params_are_validated_and_training_goes_on_with_the_local_ones(
    tmp_path: Path,
) -> None:
    islands = IslandsCallback(alone(tmp_path))
    every_step = {"val_check_interval": 1, "limit_val_batches": 1, "check_val_every_n_epoch": None}
    model = fit(tmp_path, islands, **every_step)
    begin = Small().first_values()
    first, second, third = model.validated[:3]
    assert torch.equal(first, begin), "in the first round the global params are those of the start"
    assert not torch.equal(second, first), "the round has landed"
    assert torch.equal(third, second)
    plain = IslandsCallback(alone(tmp_path / "plain"))
    fit(tmp_path / "plain", plain, limit_val_batches=0)
    assert islands.islands.digest == plain.islands.digest


def test_rounds_bytes_and_waits_are_metrics_of_the_trainer(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="log")
    fit(tmp_path, IslandsCallback(alone(tmp_path)), logger=logger, limit_val_batches=0)
    lines = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]
    rounds = [(row["step"], row["islands/round"]) for row in rows if row.get("islands/round")]
    assert rounds == [("2", "0.0"), ("4", "1.0"), ("6", "2.0")]
    assert {"islands/bytes_sent", "islands/bytes_received", "islands/wait_seconds"} <= set(names)
