"""Islands under Ray Train: each island is one TorchTrainer on a Ray cluster of its own.

python examples/ray_train.py island.index=0 island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from small_llama import BATCH, build_llama, read_windows, unit_of_windows

import diloco

NUM_WORKERS = 2


def train_on_worker(settings: dict[str, Any]) -> None:
    """All workers of a trainer are the ranks of one island. Ray starts all of them again if one fails."""
    windows = read_windows()
    model = prepare_model(build_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with diloco.Islands(settings["config"], model, optimizer, settings["overrides"]) as islands:
        rank, num_ranks = islands.place
        share = BATCH // num_ranks
        for unit in islands.units():
            batch = unit_of_windows(windows, unit)[rank * share : (rank + 1) * share]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            islands.step(tokens=batch.numel(), loss=loss)
        ray.train.report({"digest": islands.digest})


index = int(next((word.split("=")[1] for word in sys.argv if word.startswith("island.index=")), 0))
folder = Path("runs").absolute()
overrides = ["name=ray", f"island.run_dir={folder}", *sys.argv[1:]]
ray.init(address="local", num_cpus=NUM_WORKERS + 1, include_dashboard=False)
trainer = TorchTrainer(
    train_on_worker,
    train_loop_config={"config": Path(__file__).absolute().with_name("run.yaml"), "overrides": overrides},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ray.train.ScalingConfig(num_workers=NUM_WORKERS),
    run_config=ray.train.RunConfig(
        name=f"island-{index}",
        storage_path=str(folder / "ray"),
        failure_config=ray.train.FailureConfig(max_failures=-1),
    ),
)
metrics = trainer.fit().metrics
assert metrics is not None, "the last report has the digest"
print(f"the run is over, digest {metrics['digest']}")
