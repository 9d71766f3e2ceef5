"""Islands under the Trainer of Hugging Face.

python examples/huggingface_trainer.py island.index=0 island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path

from datasets import Dataset
from small_llama import BATCH, build_llama, read_windows
from transformers import Trainer, TrainingArguments

from diloco.own_loop.huggingface import IslandsCallback

index = int(next((word.split("=")[1] for word in sys.argv if word.startswith("island.index=")), 0))
windows = read_windows().tolist()
dataset = Dataset.from_dict({"input_ids": windows, "labels": windows}).shard(
    num_shards=2, index=index % 2
)
callback = IslandsCallback(Path(__file__).with_name("run.yaml"), overrides=sys.argv[1:])
arguments = TrainingArguments(
    output_dir=f"runs/example/trainer-{index}",
    per_device_train_batch_size=BATCH,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    max_steps=100000,  # the run ends it
    include_num_input_tokens_seen="all",
    save_strategy="no",
    logging_steps=50,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
Trainer(build_llama(), arguments, train_dataset=dataset, callbacks=[callback]).train()
print(f"the run is over, digest {callback.islands.digest}")
