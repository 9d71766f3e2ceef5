"""A small transformer under OLMo-core's trainer. Its batches follow from the trainer's step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.data import DataLoaderBase
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.optim.scheduler import LinearWithWarmup
from olmo_core.train import Duration, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerTrainModule

from diloco.trainers.olmo_core import IslandsCallback

SEQ_LEN = 16
BATCH_TOKENS = 4 * SEQ_LEN
WARM_UP = 100


class Batches(DataLoaderBase):
    """Batches of random tokens, which continue at the saved position."""

    total_batches = 1000

    def state_dict(self) -> dict[str, Any]:
        return {"batches_processed": self.batches_processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed = state_dict["batches_processed"]

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        self._epoch = epoch or 1

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self.get_mock_batch()

    def get_mock_batch(self) -> dict[str, Any]:
        made = torch.Generator().manual_seed(10 * self.batches_processed + self.dp_rank)
        rows = self.rank_batch_size // SEQ_LEN
        return {"input_ids": torch.randint(0, 32, (rows, SEQ_LEN), generator=made)}


class Look(Callback):
    """Records step, learning rate and loss of each step; ends training at a step if one is
    given.
    """

    def __init__(self, stop_at: int | None = None) -> None:
        self._stop_at = stop_at
        self.seen: list[tuple[int, float]] = []
        self.losses: list[float] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def post_train_batch(self) -> None:
        module = self.trainer.train_module
        self.seen.append((self.step, float(module.optim.param_groups[0]["lr"])))
        loss = self.trainer.get_metric("train/CE loss")
        assert loss is not None
        self.losses.append(loss.item())
        if self.step == self._stop_at:
            self.trainer.cancel_run("the test ends it", no_sync=True)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics[step] = dict(metrics)


Look.priority = 3
"""It sees a step before the islands change the trainer's step."""


def small_transformer(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"d_model": 16, "vocab_size": 32, "n_layers": 2, "n_heads": 2}
    model = TransformerConfig.llama_like(**sizes, hidden_size_multiple_of=16).build()
    model.init_weights(device=torch.device("cpu"), max_seq_len=SEQ_LEN)
    return model


def build(folder: Path, islands: IslandsCallback | None, look: Look, **settings: Any) -> Trainer:
    """A trainer that has not begun; by default it saves nothing."""
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    parallel = settings.pop("parallel", {})
    module = TransformerTrainModule(
        small_transformer(),
        AdamWConfig(lr=1e-1),
        SEQ_LEN,
        SEQ_LEN,
        scheduler=LinearWithWarmup(warmup=WARM_UP, warmup_fraction=None),
        device=torch.device("cpu"),
        **parallel,
    )
    ranks = {"dp_world_size": num_ranks, "dp_rank": rank}
    loader = Batches(work_dir=folder, global_batch_size=BATCH_TOKENS, **ranks)
    saves = settings.pop("save_interval", None)
    own = {
        "save_folder": str(folder),
        "work_dir": str(folder / "work"),
        "device": "cpu",
        "metrics_collect_interval": 1,
    }
    own |= {"max_duration": Duration.steps(1000)}
    config = TrainerConfig(**(own | settings))
    saving = CheckpointerCallback(
        save_interval=saves, save_async=False, max_checkpoints=None, enabled=saves is not None
    )
    config.add_callbacks({"look": look, "checkpointer": saving})
    if islands is not None:
        config.add_callback("islands", islands)
    return config.build(module, loader)


def fit(
    folder: Path, islands: IslandsCallback | None, look: Look | None = None, **settings: Any
) -> Trainer:
    trainer = build(folder, islands, look or Look(), **settings)
    trainer.fit()
    return trainer
