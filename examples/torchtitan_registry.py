"""A registry of torchtitan configs of your own, with islands.

torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan_registry \
    --config small_llama --islands examples/run.yaml --training.steps 100 \
    --island island.index=0,island.bootstrap=[ADDRESS]
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from diloco.titan.trainer import with_islands


def small_llama() -> Trainer.Config:
    """torchtitan's debug model with four layers, and a learning rate of your own."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:4]
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
    return with_islands(config)
