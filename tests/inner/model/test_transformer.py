"""The decoder equals a plain reimplementation and has the expected properties."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inner.model.rope import rope_table, rotate
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from tests.inner.small import SIZES, build_model


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_attention(weights: dict[str, Tensor], x: Tensor, sizes: ModelSizes) -> Tensor:
    """Reference attention: one position and one head at a time, with RoPE as complex numbers."""
    length, size = x.shape[0], sizes.head_dim
    freqs = torch.tensor(
        [sizes.rope_theta ** (-2 * pair / size) for pair in range(size // 2)], dtype=x.dtype
    )

    def heads(part: str) -> Tensor:
        y = (x @ weights[f"{part}_proj.weight"].T).view(length, -1, size)
        if part == "v":
            return y
        y = norm(y, weights[f"{part}_norm.weight"], sizes.norm_eps)
        angles = torch.arange(length, dtype=x.dtype)[:, None, None] * freqs
        turned = torch.complex(y[..., : size // 2], y[..., size // 2 :]) * torch.exp(1j * angles)
        return torch.cat((turned.real, turned.imag), -1)

    q, k, v = heads("q"), heads("k"), heads("v")
    rows = []
    for position in range(length):
        outs = []
        for head in range(sizes.num_heads):
            shared = head // (sizes.num_heads // sizes.num_kv_heads)
            scores = k[: position + 1, shared] @ q[position, head] / math.sqrt(size)
            outs.append(scores.softmax(0) @ v[: position + 1, shared])
        rows.append(torch.cat(outs))
    return torch.stack(rows) @ weights["out_proj.weight"].T


def plain_forward(model: Transformer, tokens: Tensor) -> Tensor:
    sizes = model.sizes
    weights = {name: param.detach().double() for name, param in model.named_parameters()}
    x = weights["embed.weight"][tokens]
    for layer in range(sizes.num_layers):
        part = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
        inner = {name.removeprefix("attention."): value for name, value in part.items()}
        x = x + plain_attention(
            inner, norm(x, part["attention_norm.weight"], sizes.norm_eps), sizes
        )
        y = norm(x, part["ffn_norm.weight"], sizes.norm_eps)
        gate = y @ part["ffn.gate_proj.weight"].T
        x = (
            x
            + (gate * gate.sigmoid() * (y @ part["ffn.up_proj.weight"].T))
            @ part["ffn.down_proj.weight"].T
        )
    head = weights["embed.weight"] if sizes.tie_embeddings else weights["head.weight"]
    return norm(x, weights["norm.weight"], sizes.norm_eps) @ head.T


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_forward_equals_a_plain_restatement(tie_embeddings: bool) -> None:
    model = build_model(replace(SIZES, tie_embeddings=tie_embeddings))
    with torch.no_grad():
        for param in model.parameters():
            # Larger than initial weights, so that attention and gate are far from uniform. Norms
            # differ from one.
            param.mul_(10) if param.ndim > 1 else param.add_(
                torch.linspace(-0.5, 0.5, param.numel())
            )
        tokens = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(
            model(tokens)[0].double(), plain_forward(model, tokens[0]), rtol=1e-4, atol=1e-4
        )


def test_a_later_token_changes_no_earlier_logits() -> None:
    model = build_model()
    tokens = torch.arange(12).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 8] = 60
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_rotated_products_depend_on_distance_alone() -> None:
    table = rope_table(replace(SIZES, rope_theta=100.0), torch.arange(20), 20)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))

    def product(at_q: int, at_k: int) -> float:
        turned_q = rotate(q.expand(1, 20, 1, 8), table)[0, at_q, 0]
        turned_k = rotate(k.expand(1, 20, 1, 8), table)[0, at_k, 0]
        return float(turned_q @ turned_k)

    assert product(5, 2) == pytest.approx(product(19, 16), rel=1e-5)
    assert product(5, 2) != pytest.approx(product(5, 3), rel=1e-2)
    assert product(0, 0) == pytest.approx(float(q @ k), rel=1e-6)


def test_rotation_keeps_the_dtype_and_computes_in_fp32() -> None:
    table = rope_table(replace(SIZES, rope_theta=1.0), torch.arange(300), 300)
    x = torch.ones(1, 300, 1, 8, dtype=torch.bfloat16)
    assert rotate(x, table).dtype == torch.bfloat16
    assert torch.equal(rotate(x, table), rotate(x.float(), table).bfloat16())


def test_first_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(0, 61, (4, 32), generator=torch.Generator().manual_seed(2))
    loss = build_model()(tokens, targets_BS=tokens) / tokens.numel()
    assert float(loss.detach()) == pytest.approx(math.log(61), rel=0.02)
