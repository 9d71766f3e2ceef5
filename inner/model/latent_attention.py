"""Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1).

    q = W_qb norm(W_qa x)         or W_q x, without a narrow vector for the queries
    [c, r] = W_kva x              a narrow vector, and the part of the key that has a position
    [k, v] = W_kvb norm(c)        per head
    head h attends with [q_h without position, rotated q_h] to [k_h, rotated r]

Keys of all heads share the rotated part. Values are narrower than keys; they are padded with zeros,
because attention kernels need equal sizes.

Shape suffixes: B sequences, S positions, H heads, E size of a query or key head, N of its part
without position, P of its part with position, W size of a value head, C width of the narrow vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.data.micro_batch import Packing
from inner.model.attention import Attend, causal_attention
from inner.model.rope import rotate, softmax_factor
from inner.model.sizes import ModelSizes

NORM_EPS = 1e-6
"""DeepSeek-V3's norms of the narrow vectors have this value, whatever the norm_eps of the model."""


class LatentAttention(nn.Module):
    """Causal self-attention from narrow vectors. It has the same interface as Attention."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        assert sizes.latent is not None, "latent attention has sizes of its own"
        self.latent = latent = sizes.latent
        if latent.q_rank is None:
            self.q_proj = nn.Linear(sizes.dim, sizes.q_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(sizes.dim, latent.q_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(latent.q_rank, eps=NORM_EPS)
            self.q_b_proj = nn.Linear(latent.q_rank, sizes.q_dim, bias=False)
        self.kv_a_proj = nn.Linear(sizes.dim, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(latent.kv_rank, eps=NORM_EPS)
        self.kv_b_proj = nn.Linear(
            latent.kv_rank, sizes.num_heads * (latent.nope_dim + latent.value_dim), bias=False
        )
        self.out_proj = nn.Linear(sizes.attended_dim, sizes.dim, bias=False)
        self.softmax_factor = softmax_factor(sizes.rope_scaling)
        self.attend: Attend = causal_attention
        self.kv_heads: slice | None = None
        """Never used: each head has keys of its own."""

    def forward(self, x_BSD: Tensor, rope_2SP: Tensor, packing: Packing | None = None) -> Tensor:
        latent = self.latent
        q_BSHE = self._queries(x_BSD).unflatten(-1, (-1, latent.qk_dim))
        (q_BSHN, q_BSHP) = q_BSHE.split((latent.nope_dim, latent.rope_dim), dim=-1)
        (c_BSC, shared_BSP) = self.kv_a_proj(x_BSD).split((latent.kv_rank, latent.rope_dim), dim=-1)
        kv_BSHX = self.kv_b_proj(self.kv_a_norm(c_BSC)).unflatten(
            -1, (-1, latent.nope_dim + latent.value_dim)
        )
        (k_BSHN, v_BSHW) = kv_BSHX.split((latent.nope_dim, latent.value_dim), dim=-1)
        rotated_BSHP = rotate(shared_BSP[:, :, None], rope_2SP).expand(-1, -1, k_BSHN.shape[2], -1)
        q_BSHE = torch.cat((q_BSHN, rotate(q_BSHP, rope_2SP)), dim=-1)
        if self.softmax_factor != 1.0:
            q_BSHE = q_BSHE * self.softmax_factor
        k_BSHE = torch.cat((k_BSHN, rotated_BSHP), dim=-1)
        v_BSHE = F.pad(v_BSHW, (0, latent.qk_dim - latent.value_dim))
        y_BSHW = self.attend(q_BSHE, k_BSHE, v_BSHE, packing)[..., : latent.value_dim]
        return self.out_proj(y_BSHW.flatten(-2))

    def _queries(self, x_BSD: Tensor) -> Tensor:
        if self.latent.q_rank is None:
            return self.q_proj(x_BSD)
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(x_BSD)))
