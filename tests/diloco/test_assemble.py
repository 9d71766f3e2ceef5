import os

import numpy as np
import pytest

from diloco.assemble import build_batches
from diloco.config.schema import parse_config
from diloco.errors import ConfigError
from diloco.records.run_folder import hold_folder
from inner.data.corpus import Corpus, Text


def test_two_processes_cannot_be_the_same_island(tmp_path):
    held = hold_folder(tmp_path / "island-0")
    with pytest.raises(ConfigError, match="a running island uses the folder"):
        hold_folder(tmp_path / "island-0")
    os.close(held)
    os.close(hold_folder(tmp_path / "island-0"))


def test_the_order_seed_alone_decides_what_is_read():
    tokens = np.arange(8 * 256 + 1, dtype=np.uint16)
    corpus = Corpus(
        (Text(tokens, tokens, heldout_bytes=len(tokens)),), vocab_size=1 << 16, eos_id=0
    )

    def first_step(text: str) -> list[list[int]]:
        config = parse_config(
            text, ["data.seq_len=8", "optimizer.tokens_per_step=64", "outer.start_islands=1"]
        ).run
        return [
            window.tolist() for window in build_batches(config, corpus).micro_batches(0, 0, 1, 8)
        ]

    assert (
        first_step("{seed: 1, order_seed: 0}") == first_step("{seed: 0}") != first_step("{seed: 1}")
    )
