"""Activation checkpointing: the same bits, less memory, and no more work than documented."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from inner.config import ParallelConfig, Recompute
from inner.data.micro_batch import Packing
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.parallel.recompute import apply_recompute
from tests.harness import run_ranks
from tests.inner.sequences import pack_at
from tests.inner.small import batch, build_model, build_trainer, share, snapshot

KINDS: tuple[Recompute, ...] = get_args(Recompute)
OTHERS = [kind for kind in KINDS if kind != "none"]
SIZES = ModelSizes(
    dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=192, vocab_size=61, qk_norm=True
)
SEQ_LEN = 64
TOKENS_BS, TARGETS_BS = torch.randint(
    0, 61, (2, 4, SEQ_LEN), generator=torch.Generator().manual_seed(0)
)
PACKING = pack_at((torch.arange(4 * SEQ_LEN).view(4, SEQ_LEN) // 24).numpy(), torch.arange(SEQ_LEN))


class Alive(TorchDispatchMode):
    """Counts the bytes that were allocated inside the context and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        views = storages((args, kwargs)).keys()
        for key, storage in storages(output).items():
            if key not in views:
                self._taken[key] = (StorageWeakRef(storage), storage.nbytes())
        return output

    @property
    def num_bytes(self) -> int:
        return sum(size for storage, size in self._taken.values() if not storage.expired())


def storages(tree: object) -> dict[int, torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Pass:
    """Measurements of a forward and a backward."""

    names: list[str]
    gradients: list[Tensor | None]
    bytes_between: int
    """Bytes alive after the forward."""
    bytes_after: int
    """Bytes alive after the backward, without gradients."""
    flops: int


def one_pass(
    kind: Recompute, packing: Packing | None = None, dtype: torch.dtype = torch.float32
) -> Pass:
    model = build_model(SIZES, seq_len=SEQ_LEN).to(dtype)
    apply_recompute(model, kind)
    with Alive() as alive:
        loss = model(TOKENS_BS, targets_BS=TARGETS_BS, packing=packing)
        between = alive.num_bytes
        loss.backward()
    names, params = zip(*model.named_parameters(), strict=True)
    gradients = [None if param.grad is None else param.grad.clone() for param in params]
    after = alive.num_bytes - sum(param.untyped_storage().nbytes() for param in params)
    with FlopCounterMode(display=False) as counter:
        model(TOKENS_BS, targets_BS=TARGETS_BS, packing=packing).backward()
    return Pass(list(names), gradients, between, after, counter.get_total_flops())


@pytest.fixture(scope="module")
def passes() -> dict[Recompute, Pass]:
    return {kind: one_pass(kind) for kind in KINDS}


def assert_same_bits(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", OTHERS)
def test_gradients_are_the_same_bits(passes: dict[Recompute, Pass], kind: Recompute) -> None:
    assert_same_bits(passes[kind].gradients, passes["none"].gradients)


@pytest.mark.parametrize("kind", OTHERS)
def test_gradients_are_the_same_bits_with_documents(kind: Recompute) -> None:
    assert_same_bits(one_pass(kind, PACKING).gradients, one_pass("none", PACKING).gradients)


@pytest.mark.parametrize("kind", OTHERS)
def test_gradients_are_the_same_bits_in_bf16(kind: Recompute) -> None:
    got, expected = (one_pass(each, dtype=torch.bfloat16).gradients for each in (kind, "none"))
    assert_same_bits(got, expected)


@pytest.mark.parametrize("kind", OTHERS)
def test_names_do_not_change(passes: dict[Recompute, Pass], kind: Recompute) -> None:
    assert passes[kind].names == passes["none"].names


def test_less_is_kept_from_none_over_attention_and_selective_to_full(
    passes: dict[Recompute, Pass],
) -> None:
    none, attention, selective, full = (passes[kind].bytes_between for kind in KINDS)
    assert full < 0.3 * none
    assert full < 0.5 * selective
    assert selective < 0.75 * attention
    assert attention < 0.9 * none


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_leaves_nothing_behind(passes: dict[Recompute, Pass], kind: Recompute) -> None:
    assert passes[kind].bytes_after == 4, "the loss"


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("attention", 0.03, 0.08), ("selective", 0, 0), ("full", 0.2, 1 / 3)],
)
def test_repeated_work_is_as_documented(
    passes: dict[Recompute, Pass], kind: Recompute, least: float, most: float
) -> None:
    assert least <= passes[kind].flops / passes["none"].flops - 1 <= most


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_gradients_keeps_nothing(kind: Recompute) -> None:
    model = build_model(SIZES, seq_len=SEQ_LEN)
    apply_recompute(model, kind)
    with torch.no_grad(), Alive() as alive:
        loss = model(TOKENS_BS, targets_BS=TARGETS_BS)
    assert loss.isfinite() and alive.num_bytes == 4, "the loss"


def hidden_pass(kind: Recompute, is_split: bool) -> tuple[list[Tensor | None], Counter[str]]:
    """Gradients of the blocks' input and weights, in one backward or split in two as in a
    zero-bubble pipeline.
    """
    model = build_model(SIZES, seq_len=SEQ_LEN)
    apply_recompute(model, kind)
    params = list(model.layers.parameters())
    generator = torch.Generator().manual_seed(1)
    x_BSD, grad_BSD = (torch.randn(2, SEQ_LEN, SIZES.dim, generator=generator) for _ in range(2))
    x_BSD.requires_grad_()
    with Calls() as calls:
        y_BSD = blocks(model, x_BSD)
        if is_split:
            _, groups = stage_backward_input([y_BSD], [grad_BSD], [x_BSD], iter(params))
            stage_backward_weight(iter(params), groups)
        else:
            y_BSD.backward(grad_BSD)
    return [param.grad for param in [x_BSD, *params]], calls.of


def blocks(model: Transformer, x_BSD: Tensor) -> Tensor:
    for layer in model.layers.children():
        x_BSD = layer(x_BSD, model.rope_2SE, None)
    return x_BSD


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_split_in_two_computes_the_same_once(kind: Recompute) -> None:
    whole, work = hidden_pass(kind, is_split=False)
    split, split_work = hidden_pass(kind, is_split=True)
    assert_same_bits(split, whole)
    for operator in ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::silu"):
        assert split_work[operator] == work[operator] > 0


MESHES = {
    "fsdp2-bf16": (Degrees(dp_shard=2), ParallelConfig(), {"compute_dtype": "bfloat16"}),
    "tp2": (Degrees(tp=2), ParallelConfig(), {}),
    "cp2": (Degrees(cp=2), ParallelConfig(), {}),
    "pp2-interleaved_zero_bubble": (
        Degrees(pp=2),
        ParallelConfig(schedule="interleaved_zero_bubble"),
        {},
    ),
    "pp2-zbv": (Degrees(pp=2), ParallelConfig(schedule="zbv"), {}),
}


@dataclass
class Life:
    """Observations of one rank in a few steps on a mesh."""

    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    collectives: int = 0
    """Collectives of tensor parallelism in the first step."""


def live(_: int) -> dict[tuple[str, Recompute], Life]:
    return {(name, kind): train(name, kind) for name in MESHES for kind in KINDS}


def train(name: str, kind: Recompute) -> Life:
    degrees, parallel, settings = MESHES[name]
    sizes = ModelSizes(
        dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61, qk_norm=True
    )
    recomputing = parallel.model_copy(update={"recompute": kind})
    trainer = build_trainer(degrees, sizes, parallel=recomputing, micro_batch=6, **settings)
    life = Life()
    for number in range(2):
        with Calls() as calls:
            result = trainer.step(share(trainer, batch(number)))
        life.losses.append(result.loss)
        life.norms.append(result.grad_norm)
        life.collectives = life.collectives or sum(
            calls.of[f"_c10d_functional::{name}"]
            for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
        )
    life.weights = snapshot(trainer.params)
    return life


@pytest.fixture(scope="module")
def lives() -> list[dict[tuple[str, Recompute], Life]]:
    return run_ranks(live, 2, timeout_seconds=240)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", MESHES)
def test_training_on_a_mesh_is_the_same_bits(
    lives: list[dict[tuple[str, Recompute], Life]], name: str, kind: Recompute
) -> None:
    for life in lives:
        got, expected = life[name, kind], life[name, "none"]
        assert (got.losses, got.norms) == (expected.losses, expected.norms)
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(got.weights, expected.weights, strict=True)
        )


def test_selective_repeats_no_collective_of_tensor_parallelism(
    lives: list[dict[tuple[str, Recompute], Life]],
) -> None:
    for life in lives:
        assert life["tp2", "full"].collectives > life["tp2", "none"].collectives > 0
        assert life["tp2", "selective"].collectives == life["tp2", "none"].collectives
