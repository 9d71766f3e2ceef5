"""What attention within documents costs: one by one, and with a mask of all pairs of positions.

    python -m scripts.bench.inner.documents [--lengths 512,2048,8192] [--document 300] [--steps 3]

A step is the forward and backward of a small model over one sequence of random documents.
Contestants are processes of one thread, which take turns. CPU time is the median of all steps but
the first. Memory is the growth of the process from before the first step to its peak. Ratios are to
`causal`, which ignores documents.
"""

import argparse
import resource
import time
from multiprocessing import get_context
from multiprocessing.pool import Pool
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from inner.data.micro_batch import Cutter, MicroBatch, Packing
from inner.model.init import initialise
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.params import LocalParams
from scripts.bench.arguments import whole_numbers

SIZES = ModelSizes(dim=64, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=128, vocab_size=260)
EOS = 0
CONTESTANTS = ("causal", "documents", "mask of all pairs")


def main() -> None:
    """Print a table with a row for each length and contestant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--lengths",
        type=whole_numbers,
        default=[512, 2048, 8192],
        help="positions, comma-separated",
    )
    parser.add_argument(
        "--document", type=int, default=300, help="mean number of tokens per document"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    args = parser.parse_args()
    # A fork hangs if its parent has run OpenMP on several threads.
    torch.set_num_threads(1)
    print("| positions | attention | CPU s per step | over causal | grew by, MB | over causal |")
    print("|---|---|---|---|---|---|")
    for seq_len in args.lengths:
        _print_rows(seq_len, args.document, args.steps)


def _print_rows(seq_len: int, mean_length: int, num_steps: int) -> None:
    pools = [
        get_context("fork").Pool(1, _prepare, (what, seq_len, mean_length)) for what in CONTESTANTS
    ]
    seconds = [[pool.apply(_step) for pool in pools] for _ in range(num_steps + 1)]
    times = [median(each) for each in zip(*seconds[1:], strict=True)]
    growths = [_close(pool) for pool in pools]
    for what, spent, grown in zip(CONTESTANTS, times, growths, strict=True):
        cells = (
            what,
            f"{spent:.3f}",
            f"{spent / times[0]:.2f}",
            f"{grown / 1e6:.0f}",
            f"{grown / growths[0]:.2f}",
        )
        print(f"| {seq_len} | {' | '.join(cells)} |", flush=True)


def _close(pool: Pool) -> int:
    growth = pool.apply(_growth)
    pool.terminate()
    pool.join()
    return growth


class _Contestant:
    """The contestant of this process."""

    model: Transformer
    batch: MicroBatch
    before: int


def _prepare(what: str, seq_len: int, mean_length: int) -> None:
    torch.set_num_threads(1)
    model = Transformer(SIZES, torch.arange(seq_len))
    initialise(LocalParams(model, [model]), [model], seed=0)
    if what == "mask of all pairs":
        for layer in model.blocks():
            layer.attention.attend = _mask_all_pairs
    generator = torch.Generator().manual_seed(seq_len)
    window = torch.randint(1, SIZES.vocab_size, (1, seq_len + 1), generator=generator)
    window[torch.rand(window.shape, generator=generator) < 1 / mean_length] = EOS
    _Contestant.model = model
    _Contestant.batch = Cutter(torch.arange(seq_len), seq_len, None if what == "causal" else EOS)(
        window
    )
    _Contestant.before = _peak()


def _step() -> float:
    """Make one forward and backward, and return its CPU seconds."""
    started = time.process_time()
    tokens_BS, targets_BS, packing = _Contestant.batch
    _Contestant.model(tokens_BS, targets_BS=targets_BS, packing=packing).backward()
    return time.process_time() - started


def _growth() -> int:
    return _peak() - _Contestant.before


def _peak() -> int:
    """Return the peak memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _mask_all_pairs(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, packing: Packing | None
) -> Tensor:
    """Compute what `causal_attention` computed before it took documents one by one."""
    assert packing is not None
    documents_BS = torch.from_numpy(packing.sequences_BT)
    seen_B1SS = (documents_BS[:, None, :, None] == documents_BS[:, None, None, :]).tril()
    heads_first = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
    return F.scaled_dot_product_attention(
        *heads_first, attn_mask=seen_B1SS, enable_gqa=True
    ).transpose(1, 2)


if __name__ == "__main__":
    main()
