"""Initial weights. They follow from (seed, parameter name, row, column), so all meshes and islands
get the same bits.

Islands with different processors must agree, so no operation here may round differently on another
processor. Random integers choose from a table of normal values. The table is computed by additions,
multiplications, divisions and square roots in fp64, each of which IEEE 754 rounds in one way only.
torch's own initialisers do not have this property: they use different code for different vector
units, and on a CPU mesh they give every shard the same numbers.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from inner.model.transformer import Transformer
from inner.param_spec import ParamSlice, ParamSpec
from inner.params import LocalParams

STD = 0.02
RESIDUAL_OUTPUTS = ("out_proj.weight", "down_proj.weight")
WORDS_PER_COUNT = 4
"""Number of 64-bit words that Philox gives for each value of its counter."""
DRAWS_PER_COUNT = 4 * WORDS_PER_COUNT
"""Number of 16-bit draws in these words."""
BLOCK_DRAWS = 1 << 18
"""Approximate number of values that are drawn at a time, so that they stay in the processor's
cache."""


def initialise(params: LocalParams, stages: Sequence[Transformer], seed: int) -> None:
    """Fill every parameter and table of materialised stages, sharded or not. No communication."""
    sizes = stages[0].sizes
    norm_weight = 0.0 if sizes.decoder.norm == "rms_plus_one" else 1.0
    specs = {spec.name: spec for spec in params.specs}
    for index, param_slice in enumerate(params.slices):
        params.write(
            index,
            initial_values(
                specs[param_slice.name], param_slice, seed, sizes.num_layers, norm_weight
            ),
        )
    for stage in stages:
        stage.fill_tables()


def initial_values(
    spec: ParamSpec, held: ParamSlice, seed: int, num_layers: int, norm_weight: float = 1.0
) -> Tensor:
    """Return the slice `held` of a parameter's initial value, 2-D fp32 on the CPU. Only the rows of
    the slice are drawn. `norm_weight`: the weight with which a norm begins with the factor 1.
    """
    if spec.name.endswith("norm.weight"):
        return torch.full(held.shape, norm_weight)
    if spec.name.endswith(".bias"):
        return torch.zeros(held.shape)
    # Each layer adds two outputs to the residual stream, whose variance must not grow with depth.
    std = STD / math.sqrt(2 * num_layers) if spec.name.endswith(RESIDUAL_OUTPUTS) else STD
    values = torch.empty(held.shape)
    fill_normal(
        values, f"{seed}/{spec.name}", held.rows[0], held.cols[0], spec.matrix_shape[1], std
    )
    return values


# A torch operator, so that a dry run, whose tensors have no values, does not draw any.
@torch.library.custom_op("diloco::fill_normal", mutates_args={"values"})
def fill_normal(values: Tensor, key: str, row: int, col: int, num_cols: int, std: float) -> None:
    """Fill `values` (2-D fp32 on the CPU) with the rectangle at (row, col) of a normal matrix with
    `num_cols` columns.

    The matrix follows from `key` alone; each row is drawn in full.
    """
    table = normal_table() * np.float32(std)
    target = values.numpy()
    for start, draws in random_rows(key, row, row + len(target), num_cols):
        target[start - row : start - row + len(draws)] = table[
            draws[:, col : col + target.shape[1]]
        ]


@fill_normal.register_fake
def _(values: Tensor, key: str, row: int, col: int, num_cols: int, std: float) -> None:
    """Do nothing: tensors of a dry run have no values to fill."""


def random_rows(key: str, first: int, end: int, num_cols: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield rows [first, end) of a matrix of random uint16 in blocks, each with the number of its
    first row.

    A row depends only on `key` and its number: Philox is counter-based, and numpy guarantees its
    stream.
    """
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], dtype="<u8")
    counts_per_row = -(-num_cols // DRAWS_PER_COUNT)
    rows_per_block = max(1, BLOCK_DRAWS // (counts_per_row * DRAWS_PER_COUNT))
    for start in range(first, end, rows_per_block):
        num_rows = min(rows_per_block, end - start)
        generator = np.random.Philox(key=words, counter=start * counts_per_row)
        raw = generator.random_raw(num_rows * counts_per_row * WORDS_PER_COUNT)
        yield start, raw.astype("<u8", copy=False).view("<u2").reshape(num_rows, -1)[:, :num_cols]


@cache
def normal_table() -> np.ndarray:
    """Return the quantiles (i + 1/2) / 65536 of the standard normal distribution, fp32 [65536], for
    i = 0, 1, ...

    The largest is 4.32. Algorithm AS 241 of Wichura (1988), PPND7: to about 7 digits.
    """
    centred = (np.arange(1 << 15) + 0.5) / (1 << 16)  # p - 1/2 of the upper half; exact
    r = 0.180625 - centred * centred
    near = centred * polynomial(
        r, (3.3871327179e00, 5.0434271938e01, 1.5929113202e02, 5.9109374720e01)
    )
    near /= polynomial(r, (1.0, 1.7895169469e01, 7.8757757664e01, 6.7187563600e01))
    s = np.sqrt(-log(0.5 - centred)) - 1.6
    far = polynomial(s, (1.4234372777e00, 2.7568153900e00, 1.3067284816e00, 1.7023821103e-1))
    far /= polynomial(s, (1.0, 7.3700164250e-1, 1.2021132975e-1))
    upper = np.where(centred <= 0.425, near, far).astype(np.float32)
    return np.concatenate([-upper[::-1], upper])


def polynomial(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """Return c0 + c1 x + c2 x^2 + ..., by Horner's rule, with every operation rounded
    separately.
    """
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def log(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of x > 0 in fp64, to about 12 digits. The last bit of a C
    library's logarithm may differ.

    log(m 2^k) = k log 2 + 2 artanh(u) with u = (m - 1) / (m + 1), artanh(u) = u + u^3 / 3 + u^5 / 5
    + ...
    """
    m, k = np.frexp(x)  # 1/2 <= m < 1
    u = (m - 1) / (m + 1)
    series = polynomial(u * u, [1 / n for n in range(1, 26, 2)])
    return k * 0.6931471805599453 + 2 * u * series
