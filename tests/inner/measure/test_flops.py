from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from inner.config import (
    DecoderConfig,
    LatentConfig,
    OptimizerConfig,
    ParallelConfig,
    PredictConfig,
    Recompute,
    WindowConfig,
)
from inner.flops import flops_per_token, layer_costs
from inner.measure.peak_flops import peak_flops, utilisation
from inner.mesh import Degrees
from inner.model.sizes import PRESETS, ModelSizes
from tests.harness import run_ranks
from tests.inner import small
from tests.parity.meshes import LATENT, MIXTURE


def grouped_mm_flop(x: torch.Size, matrices: torch.Size, *_: object, **__: object) -> int:
    """Operations of rows times one matrix per group, or of the product of two stacks of rows by
    group.
    """
    num_rows, inner = x
    if len(matrices) == 3:
        return 2 * num_rows * inner * matrices[-1]
    # The gradient of the weights: each row of both stacks meets the same row of the other.
    return 2 * num_rows * inner * matrices[-1]


SEQUENCES = 2
SEQ_LEN = 48
MODELS = {
    "untied, each query head its own keys": ModelSizes(
        dim=64, num_layers=3, num_heads=4, num_kv_heads=4, ffn_dim=96, vocab_size=80
    ),
    "tied, shared keys": ModelSizes(
        dim=64,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        ffn_dim=160,
        vocab_size=200,
        tie_embeddings=True,
    ),
    "normed queries and keys": ModelSizes(
        dim=96, num_layers=2, num_heads=6, num_kv_heads=3, ffn_dim=128, vocab_size=61, qk_norm=True
    ),
    "biases and wide heads": ModelSizes(
        dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=96,
        vocab_size=61,
        qkv_bias=True,
        own_head_dim=32,
    ),
    "experts, one of them shared, after a dense layer": MIXTURE,
    "experts, latent attention": LATENT,
    "two extra depths": ModelSizes(
        dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=96,
        vocab_size=80,
        predict=PredictConfig(depths=2),
    ),
    "experts and an extra depth": replace(MIXTURE, predict=PredictConfig(depths=1)),
    "latent attention without narrow queries": replace(
        LATENT, experts=None, latent=LatentConfig(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=12)
    ),
}
MODELS |= {
    "no gate, LayerNorm, learned positions": replace(
        MODELS["biases and wide heads"],
        decoder=DecoderConfig(
            norm="layer",
            gated=False,
            activation="gelu",
            ffn_bias=True,
            positions="learned",
            max_positions=SEQ_LEN,
        ),
    ),
    "normed outputs": replace(
        MODELS["normed queries and keys"], decoder=DecoderConfig(norm_place="both")
    ),
    "parallel blocks": replace(
        MODELS["tied, shared keys"], decoder=DecoderConfig(parallel="one_norm")
    ),
}
GROUPED_PRODUCTS = {torch.ops.aten._grouped_mm: grouped_mm_flop}
"""torch's counter does not know products with one matrix per group of rows."""
KINDS: tuple[Recompute, ...] = ("none", "attention", "selective", "full")


def _count(rank: int) -> dict[tuple[str, Recompute], int]:
    """Operations of a step per token, as counted by torch."""
    counted = {}
    for name, sizes in MODELS.items():
        for recompute in KINDS:
            trainer = small.build_trainer(
                Degrees(),
                sizes=sizes,
                config=OptimizerConfig(tokens_per_step=SEQUENCES * SEQ_LEN),
                parallel=ParallelConfig(recompute=recompute),
                # torch does not count the in-place product that accumulates the table's gradient in
                # fp32.
                compute_dtype="bfloat16",
                micro_batch=SEQUENCES,
                seq_len=SEQ_LEN,
            )
            window = small.batch(0)[:1, :2].repeat(SEQUENCES, SEQ_LEN)[:, : SEQ_LEN + 1]
            # torch does not count the CPU's fused attention, the only kind whose results selective
            # recompute keeps.
            kernel = SDPBackend.FLASH_ATTENTION if recompute == "selective" else SDPBackend.MATH
            counting = FlopCounterMode(display=False, custom_mapping=GROUPED_PRODUCTS)
            with counting as counter, sdpa_kernel(kernel):
                trainer.step([window])
            counted[name, recompute] = counter.get_total_flops() / (SEQUENCES * SEQ_LEN)
    return counted


@pytest.fixture(scope="module")
def counted() -> dict[tuple[str, Recompute], int]:
    return run_ranks(_count, 1)[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_models_operations_are_what_torch_counts(counted, model):
    flops = flops_per_token(MODELS[model], SEQ_LEN)
    # torch's kernel also multiplies the zeros with which values are padded.
    assert counted[model, "none"] == pytest.approx(flops.total + flops.padding, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_repeated_operations_are_what_torch_counts(counted, model, recompute):
    flops = flops_per_token(MODELS[model], SEQ_LEN, recompute)
    # The kernel that torch counts keeps the scores, whereas fused kernels recompute them.
    scores = flops_per_token(MODELS[model], SEQ_LEN, "none").recomputed
    assert counted[model, recompute] == pytest.approx(flops.hardware - scores, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_selective_recompute_repeats_no_product(counted, model):
    flops = flops_per_token(MODELS[model], SEQ_LEN, "selective")
    assert counted[model, "selective"] == pytest.approx(flops.matmul, rel=0.01)
    assert flops.recomputed == flops_per_token(MODELS[model], SEQ_LEN).recomputed


def test_the_documented_figure():
    assert flops_per_token(PRESETS["8b"], 8192).total == pytest.approx(57.9e9, rel=0.001)


def test_a_head_costs_what_a_model_without_layers_costs():
    sizes = MODELS["tied, shared keys"]
    with_layer, without = (
        flops_per_token(replace(sizes, num_layers=n), SEQ_LEN, "full").hardware for n in (1, 0)
    )
    assert layer_costs(sizes, SEQ_LEN, "full").head == pytest.approx(
        without / (with_layer - without)
    )


def test_a_layer_with_a_window_costs_the_pairs_in_it():
    sizes = replace(
        PRESETS["8b"], decoder=DecoderConfig(window=WindowConfig(size=1024, full_every=2))
    )
    whole = flops_per_token(PRESETS["8b"], 8192)
    pairs = sum(min(position, 1024) for position in range(1, 8193)) / sum(range(1, 8193))
    found = flops_per_token(sizes, 8192)
    assert found.matmul == whole.matmul
    assert found.attention == pytest.approx(whole.attention * (1 + pairs) / 2, rel=0.001)
    costs = layer_costs(sizes, 8192).layers
    assert costs[0] < 1 < costs[1] and costs[:2] * 16 == costs
    assert sum(costs) == pytest.approx(32)


def test_the_cpus_peak_is_measured_once():
    first = peak_flops("cpu", "float32")
    assert first is not None and first > 0
    assert peak_flops("cpu", "float32") == first


def test_a_dtype_without_products_has_no_peak():
    assert peak_flops("cpu", "bool") is None


def test_utilisation_is_the_share_of_all_ranks_peak():
    assert utilisation(flops=1e9, tokens_per_second=2000, num_ranks=4, peak=1e12) == 0.5
