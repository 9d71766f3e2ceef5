"""What the examples share: a Llama of 0.1M parameters, and the bytes of this project's documents to
train it on.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEQ_LEN = 64
BATCH = 8


def build_llama(vocab_size: int = 256) -> LlamaForCausalLM:
    """The same weights on every island, because all draw them from the same seed."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, max_position_embeddings=SEQ_LEN, **sizes)
    ).float()


def read_windows() -> torch.Tensor:
    """All windows of the text, int64 [windows, SEQ_LEN]."""
    folder = Path(__file__).parents[1]
    text = b"".join(
        path.read_bytes() for path in sorted([folder / "README.md", *folder.glob("docs/*.md")])
    )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)


def unit_of_windows(windows: torch.Tensor, unit: int) -> torch.Tensor:
    """The batch of a unit of data, int64 [BATCH, SEQ_LEN]."""
    places = torch.arange(unit * BATCH, (unit + 1) * BATCH) % len(windows)
    return windows[places]
