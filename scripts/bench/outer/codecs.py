"""Speed of each codec beside torch's casts and hivemind's codecs, on the same part, on one thread.

    python -m scripts.bench.outer.codecs [--elements N] [--repeat N]

GB/s counts the bytes of the fp32 values in both directions. `x uniform8` is the time of hivemind's
uniform 8-bit codec over this codec's time: above 1 is faster.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    Uniform8BitQuantization,
)

from outer.codecs import build_codec
from outer.config import CodingConfig
from outer.merges.mean import WeightedSum
from outer.space.digest import part_digest

CODECS = (
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int4 stochastic",
    "e3m0",
    "stat2",
    "topk",
    "lowrank",
)
BASELINE = "hivemind uniform8"
Operation = Callable[[], object]


def main() -> None:
    """Print the table."""
    args = _arguments()
    torch.set_num_threads(1)
    # hivemind uses functions that torch has deprecated.
    warnings.filterwarnings("ignore", category=UserWarning)
    values = torch.randn(args.elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    actions, bits = _build_operations(values)
    seconds = _median_seconds(actions, args.repeat)
    print(
        f"{args.elements} elements, {args.repeat} repeats, median; torch {torch.__version__}, 1 "
        "thread"
    )
    print(f"{'':<19}{'':>8}  {'-------- encode --------':^26}  {'-------- decode --------':^26}")
    columns = f"{'us':>8}{'GB/s':>7}{'x uniform8':>11}"
    print(f"{'codec':<19}{'bits':>8}  {columns}  {columns}")
    for name in bits:
        cells = [
            _cells(seconds[name, side], seconds[BASELINE, side], values.nbytes)
            for side in ("encode", "decode")
        ]
        print(f"{name:<19}{bits[name]:>8.4f}  {cells[0]}  {cells[1]}")
    for name in ("clone", "merge add", "digest"):
        print(f"{name:<19}{'':>8}  {_cells(seconds[name, ''], None, values.nbytes)}")
    if not find_spec("bitsandbytes"):
        print("hivemind blockwise8: not measured, bitsandbytes is not installed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--elements", type=int, default=262144, help="number of elements of the part"
    )
    parser.add_argument(
        "--repeat", type=int, default=200, help="number of measurements of each action"
    )
    return parser.parse_args()


def _cells(seconds: float, baseline: float | None, num_bytes: int) -> str:
    ratio = f"{baseline / seconds:>11.2f}" if baseline else ""
    return f"{seconds * 1e6:>8.1f}{num_bytes / seconds / 1e9:>7.2f}{ratio}"


def _build_operations(
    values: torch.Tensor,
) -> tuple[dict[tuple[str, str], Operation], dict[str, float]]:
    """Build the operations to measure, and return the bits per element of each codec, too.

    The keys of the operations are (printed name, direction).
    """
    narrow = values.bfloat16()
    actions: dict[tuple[str, str], Operation] = {
        ("torch bf16", "encode"): values.bfloat16,
        ("torch bf16", "decode"): narrow.float,
    }
    bits = {"torch bf16": 16.0}
    for label in CODECS:
        name, *stochastic = label.split()
        codec = build_codec(name, CodingConfig(rounding="stochastic" if stochastic else "nearest"))
        payload = codec.encode(values)
        actions[label, "encode"] = lambda codec=codec: codec.encode(values)
        actions[label, "decode"] = lambda codec=codec, payload=payload: codec.decode(
            payload, values.numel()
        )
        bits[label] = 8 * payload.numel() / values.numel()
    for label, codec in _hivemind_codecs().items():
        coded = codec.compress(values, CompressionInfo(key=None, descriptor=None))  # pyright: ignore
        extract = _extract_uniform8 if label == BASELINE else codec.extract
        info = CompressionInfo(key=None, descriptor=None)  # pyright: ignore
        actions[label, "encode"] = lambda codec=codec, info=info: codec.compress(values, info)
        actions[label, "decode"] = lambda extract=extract, coded=coded: extract(coded)
        bits[label] = 8 * len(coded.buffer) / values.numel()
    total = WeightedSum(values.numel())
    actions["clone", ""] = values.clone
    actions["merge add", ""] = lambda: total.add(values, 0.5)
    actions["digest", ""] = lambda: part_digest(values)
    return actions, bits


def _hivemind_codecs() -> dict[str, CompressionBase]:
    codecs: dict[str, CompressionBase] = {
        "hivemind float16": Float16Compression(),
        BASELINE: Uniform8BitQuantization(),
    }
    return (
        codecs | {"hivemind blockwise8": BlockwiseQuantization()}
        if find_spec("bitsandbytes")
        else codecs
    )


def _extract_uniform8(coded: Any) -> torch.Tensor:
    """Decode hivemind's protobuf. hivemind's own `extract` calls int() on an array, which numpy 2.4
    refuses.
    """
    num_entries = np.frombuffer(coded.buffer, count=1, dtype=np.int64).item()
    table = torch.as_tensor(
        np.frombuffer(coded.buffer, offset=8, count=num_entries, dtype=np.float32)
    )
    codes = np.frombuffer(coded.buffer, offset=8 + 4 * num_entries, dtype=np.uint8)
    return table[torch.as_tensor(codes, dtype=torch.int64).reshape(tuple(coded.size))]


def _median_seconds(
    actions: dict[tuple[str, str], Operation], repeat: int
) -> dict[tuple[str, str], float]:
    """Return the median seconds of each operation.

    The operations take turns, so that a busy machine affects all of them alike.
    """
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in actions}
    for _ in range(repeat):
        for name, action in actions.items():
            # The first call warms the caches, which the other operations have just emptied.
            action()
            started_at = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - started_at)
    return {name: median(measured) for name, measured in seconds.items()}


if __name__ == "__main__":
    main()
