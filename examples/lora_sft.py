"""LoRA adapters, fine-tuned by TRL over islands: python examples/lora_sft.py island.index=0
island.bootstrap=[ADDRESS]

Only the adapters require gradients, so only they travel. They are drawn at random: the seed comes
before.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from small_llama import BATCH, build_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from diloco.own_loop.huggingface import IslandsCallback


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=letters[0], eos_token=letters[1]
    )


index = int(next((word.split("=")[1] for word in sys.argv if word.startswith("island.index=")), 0))
model = build_llama()
torch.manual_seed(0)
adapted = get_peft_model(
    model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
sums = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(40) for b in range(40)]
callback = IslandsCallback(
    Path(__file__).with_name("run.yaml"), overrides=["name=lora", *sys.argv[1:]]
)
arguments = SFTConfig(
    output_dir=f"runs/lora/trainer-{index}",
    per_device_train_batch_size=BATCH,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_steps=100000,  # the run ends it
    save_strategy="no",
    logging_steps=50,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
)
dataset = Dataset.from_list(sums).shard(num_shards=2, index=index % 2)
SFTTrainer(
    adapted,
    arguments,
    train_dataset=dataset,
    processing_class=build_tokenizer(),
    callbacks=[callback],
).train()
print(f"the run is over, digest {callback.islands.digest}")
