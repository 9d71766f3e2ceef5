"""Helpers of the codec tests: parts to encode, and each codec's documented bound."""

import numpy as np
import torch
from hypothesis import strategies as st

from outer.codecs import build_codec

DENSE = ["fp32", "bf16", "fp16", "int8", "int4", "e3m0"]
"""Codecs that bound the error of each element by itself or by its block."""
NAMES = [*DENSE, "stat2", "topk", "lowrank"]
SIZES = [0, 1, 2, 127, 128, 255, 256, 257, 1000, 4096, 4097]
FP32_MAX = torch.finfo(torch.float32).max

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite_values = st.lists(floats, max_size=600).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


def mixed_values(size: int, seed: int) -> torch.Tensor:
    """Values over some 30 decades, whose magnitude changes along the part and between elements."""
    rng = np.random.default_rng(seed)
    exponent = np.linspace(-20, 8, size) if size else np.empty(0)
    values = rng.standard_normal(size) * 10.0 ** (exponent + rng.standard_normal(size))
    return torch.from_numpy(values.astype(np.float32))


def normal_values(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    codec = build_codec(name)
    return codec.decode(codec.encode(values), values.numel())


def peaks_of(values: np.ndarray, block: int) -> np.ndarray:
    """The largest magnitude of each element's block, in fp64."""
    num_blocks = -(-len(values) // block)
    peaks = [np.abs(values[block * b : block * (b + 1)]).max() for b in range(num_blocks)]
    return np.repeat(np.array(peaks, dtype=np.float64), block)[: len(values)]


def int8_steps(values: np.ndarray) -> np.ndarray:
    """The largest difference between adjacent codes, for each element."""
    return np.maximum(peaks_of(values, 256) / 127, 2.0**-120) * (1 + 2.0**-16)


def int4_steps(values: np.ndarray) -> np.ndarray:
    return np.maximum(peaks_of(values, 128) / 7 * (1 + 2.0**-7), 2.0**-108)


def error_bound(name: str, values: torch.Tensor) -> np.ndarray:
    """The documented bound for each element, in fp64; for int8 valid up to magnitudes of
    3.37e38.
    """
    x = np.abs(values.numpy().astype(np.float64))
    if name == "fp32" or not len(x):
        return np.zeros_like(x)
    if name == "bf16":
        return np.maximum(x * 2.0**-8, 2.0**-134)
    if name == "fp16":
        scale = max(x.max() * 2.0**-13.99, 2.0**-100)
        return np.maximum(x * 2.0**-11, scale * 2.0**-25)
    if name == "int8":
        return 0.5001 * int8_steps(x)
    if name == "int4":
        return 0.5001 * int4_steps(x)
    scale = np.maximum(peaks_of(x, 128) * (1 + 2.0**-8), 2.0**-108)
    return np.maximum(x * 0.33334, scale * 1.0001 / 128)
