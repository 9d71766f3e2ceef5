"""Islands under the trainer of OLMo-core.

python examples/olmo_core_trainer.py island.index=0 island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path

import numpy as np
import torch
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import (
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import CheckpointerCallback
from olmo_core.train.train_module import TransformerTrainModule
from small_llama import BATCH, SEQ_LEN, read_windows

from diloco.trainers.olmo_core import IslandsCallback

index = int(next((word.split("=")[1] for word in sys.argv if word.startswith("island.index=")), 0))
folder = Path(f"runs/example/olmo-core-{index}").absolute()
prepare_training_environment(seed=0, backend=None)

folder.mkdir(parents=True, exist_ok=True)
tokens = read_windows()[index % 2 :: 2].flatten().numpy().astype(np.uint16)
text = np.memmap(folder / "tokens.npy", np.uint16, "w+", shape=tokens.shape)
text[:] = tokens
text.flush()
tokenizer = TokenizerConfig(vocab_size=256, eos_token_id=0, pad_token_id=0)
dataset = NumpyFSLDatasetConfig(
    tokenizer=tokenizer,
    paths=[str(folder / "tokens.npy")],
    sequence_length=SEQ_LEN,
    work_dir=str(folder),
).build()
loader = NumpyDataLoaderConfig(
    global_batch_size=BATCH * SEQ_LEN, seed=index, work_dir=str(folder)
).build(dataset)

torch.manual_seed(0)
sizes = {"d_model": 64, "n_layers": 2, "n_heads": 4, "hidden_size_multiple_of": 32}
model = TransformerConfig.llama_like(vocab_size=256, **sizes).build()
model.init_weights(device=torch.device("cpu"), max_seq_len=SEQ_LEN)
module = TransformerTrainModule(
    model,
    AdamWConfig(lr=3e-3),
    BATCH * SEQ_LEN,
    SEQ_LEN,
    device=torch.device("cpu"),
    max_grad_norm=1.0,
)
callback = IslandsCallback(Path(__file__).with_name("run.yaml"), ["name=olmo-core", *sys.argv[1:]])
config = TrainerConfig(
    save_folder=str(folder),
    work_dir=str(folder),
    max_duration=Duration.steps(100000),  # the run ends it
    device="cpu",
    no_checkpoints=True,
)
config.add_callback("islands", callback)
config.add_callback("checkpointer", CheckpointerCallback(enabled=False))
trainer = config.build(module, loader)
trainer.fit()
print(f"the run is over, digest {trainer.callbacks['islands'].islands.digest}")
teardown_training_environment()
