"""Rotary position embedding (RoPE), and the scalings of its frequencies for sequences longer than
in pre-training.

Pair e of a head of size E turns by position x f_e with f_e = theta^(-2 e / E). A scaling by
`factor` keeps a share s_e of each frequency and divides the rest: f_e (s_e + (1 - s_e) / factor). N
is the length of the pre-training sequences.

    linear   s = 0: all positions are interpolated
    llama3   s = (N f_e / 2 pi - low_freq_factor) / (high_freq_factor - low_freq_factor), within 0
             and 1
    yarn     s falls from 1 to 0 between the pairs that turn beta_fast and beta_slow times over N
             positions (2309.00071, section 3.2); cosines and sines are multiplied by
             attention_factor (section 3.4)
    dynamic  changes theta instead, for sequences of S > N: theta (factor S / N - factor + 1)^(E /
             (E - 2))

Shape suffixes: B sequences, S positions, H heads, E head size, P = E/2.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from inner.config import RopeScaling
from inner.model.sizes import ModelSizes


def rope_table(sizes: ModelSizes, positions_S: Tensor, seq_len: int) -> Tensor:
    """Return the factors for `rotate`: (cos, cos) and (-sin, sin) of the angles at some positions
    of a sequence.

    (2, S, E), fp32 on the CPU, where E is the size of the part of a head that turns. `seq_len` is
    the length of the whole sequence. The table has both halves of that part, because a layer that
    concatenated them itself would keep its own copy for the backward.
    """
    angles_SP = torch.outer(positions_S.float(), rope_frequencies(sizes, seq_len))
    cos_SP = angles_SP.cos()
    sin_SP = angles_SP.sin()
    table_2SE = torch.stack(
        (torch.cat((cos_SP, cos_SP), dim=-1), torch.cat((-sin_SP, sin_SP), dim=-1))
    )
    return table_2SE * attention_factor(sizes.rope_scaling)


def has_window_rope_table(sizes: ModelSizes) -> bool:
    """Return whether RoPE has another base in layers with a window."""
    window = sizes.decoder.window
    return (
        window is not None and window.rope_theta is not None and sizes.decoder.positions == "rope"
    )


def window_rope_table(sizes: ModelSizes, positions_S: Tensor, seq_len: int) -> Tensor:
    """Return the same as `rope_table` for layers with a window, where RoPE has a base of its own
    and is not scaled.
    """
    window = sizes.decoder.window
    assert window is not None and window.rope_theta is not None, (
        "there is a base for layers with a window"
    )
    return rope_table(
        replace(sizes, rope_theta=window.rope_theta, rope_scaling=None), positions_S, seq_len
    )


def rope_frequencies(sizes: ModelSizes, seq_len: int) -> Tensor:
    """Return the angle per position of each pair (P), fp32 on the CPU. Only dynamic scaling depends
    on `seq_len`.
    """
    scaling = sizes.rope_scaling
    theta = sizes.rope_theta
    if scaling is not None and scaling.rope_type == "dynamic":
        theta *= _dynamic_growth(scaling, sizes.rope_dim, seq_len)
    exponents_P = torch.arange(0, sizes.rope_dim, 2, dtype=torch.float32) / sizes.rope_dim
    frequencies_P = theta**-exponents_P
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies_P
    kept_P = _kept_share(frequencies_P, scaling, theta)
    return frequencies_P * (kept_P + (1 - kept_P) / scaling.factor)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor for cosines and sines; 1 except for yarn."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _yarn_growth(scaling, scaling.mscale) / _yarn_growth(scaling, scaling.mscale_all_dim)
    return _yarn_growth(scaling, 1.0)


def softmax_factor(scaling: RopeScaling | None) -> float:
    """Return the factor for the scores of latent attention; 1 except for yarn with
    mscale_all_dim.
    """
    if scaling is None or scaling.mscale_all_dim is None:
        return 1.0
    return _yarn_growth(scaling, scaling.mscale_all_dim) ** 2


def _yarn_growth(scaling: RopeScaling, weight: float) -> float:
    return 0.1 * weight * math.log(scaling.factor) + 1.0


def rotate(x_BSHE: Tensor, rope_2SE: Tensor) -> Tensor:
    """Apply RoPE: rotate the pairs (e, e + P) of each head. Computed in fp32 and cast back. If the
    table is narrower than a head, only the first part of the head turns.
    """
    width = rope_2SE.shape[-1]
    if width < x_BSHE.shape[-1]:
        return torch.cat((rotate(x_BSHE[..., :width], rope_2SE), x_BSHE[..., width:]), dim=-1)
    cos_SHE, sin_SHE = rope_2SE[:, : x_BSHE.shape[1], None]
    fp32_BSHE = x_BSHE.float()
    # Rotating whole heads takes fewer passes over memory than rotating each half separately.
    turned_BSHE = fp32_BSHE * cos_SHE + fp32_BSHE.roll(x_BSHE.shape[-1] // 2, dims=-1) * sin_SHE
    return turned_BSHE.to(x_BSHE.dtype)


def _dynamic_growth(scaling: RopeScaling, head_dim: int, seq_len: int) -> float:
    """Return the factor for theta; 1 for sequences up to the original length."""
    stretch = max(seq_len / scaling.original_length, 1.0)
    return (scaling.factor * stretch - scaling.factor + 1) ** (head_dim / (head_dim - 2))


def _kept_share(frequencies_P: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Return the share s of each frequency that is not divided."""
    if scaling.rope_type == "llama3":
        low = scaling.low_freq_factor or 1.0
        high = scaling.high_freq_factor or 4.0
        turns_P = scaling.original_length * frequencies_P / (2 * math.pi)
        return ((turns_P - low) / (high - low)).clamp(0, 1)
    if scaling.rope_type == "yarn":
        num_pairs = len(frequencies_P)
        fast, slow = (
            num_pairs * math.log(scaling.original_length / (2 * math.pi * turns)) / math.log(theta)
            for turns in (scaling.beta_fast or 32.0, scaling.beta_slow or 1.0)
        )
        first = max(math.floor(fast), 0)
        last = min(math.ceil(slow), 2 * num_pairs - 1)
        # If both bounds are the same pair, the share falls from 1 to 0 at once.
        return 1 - ((torch.arange(num_pairs) - first) / max(last - first, 0.001)).clamp(0, 1)
    return torch.zeros_like(frequencies_P)
