"""CPU time of a step of a mixture of experts: inner's trainer beside plain PyTorch and
transformers, on one process.

    python scripts/bench/inner/experts.py [--steps N] [--experts 16] [--dim 256]

    ours          inner's trainer, with balance by biases and counts of every step
    grouped       a plain decoder whose experts are grouped matrix products
    loop          the same, with a loop over the experts
    transformers  MixtralForCausalLM as it comes

Contestants take turns, one step each. They begin with the same weights and read the same sequences,
so their first losses must agree. A ratio is the median over the rounds of a contestant's tokens per
CPU second, divided by those of `loop` in the same round.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[3]
# Otherwise the script's own folder comes first, and `inner` is a file in it, not the package.
sys.path[0] = str(ROOT)
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from inner.config import ExpertsConfig, ParallelConfig  # noqa: E402
from inner.huggingface.save import Export, save_model  # noqa: E402
from inner.mesh import Degrees, IslandMesh  # noqa: E402
from inner.model.init import initialise  # noqa: E402
from inner.model.sizes import ModelSizes  # noqa: E402
from inner.model.transformer import Transformer  # noqa: E402
from inner.params import LocalParams, unstack  # noqa: E402
from inner.trainer import Trainer, TrainerSettings  # noqa: E402
from scripts.bench.inner.inner_rivals import OPTIMIZER, Logits, WithLoss, plain_optimizer  # noqa: E402
from scripts.bench.plain_llama import PlainBlock, PlainLlama, plain_step  # noqa: E402

SEED = 7
VOCAB = 260
SEQ_LEN = 256
SEQUENCES = 8
LAYERS = 4
TOLERANCE = 1e-4
"""Largest relative difference of first losses."""
Step = Callable[[int], float]


class PlainMixture(nn.Module):
    """A mixture of experts as one would write it: softmax, the best `per_token`, weights divided by
    their sum.
    """

    def __init__(self, sizes: ModelSizes, *, is_grouped: bool) -> None:
        super().__init__()
        assert sizes.experts is not None, "the model has experts"
        number = sizes.experts.number
        width = sizes.experts.dim
        self.per_token = sizes.experts.per_token
        self.is_grouped = is_grouped
        self.router = nn.Linear(sizes.dim, number, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(number, width, sizes.dim))
        self.up_proj = nn.Parameter(torch.empty(number, width, sizes.dim))
        self.down_proj = nn.Parameter(torch.empty(number, sizes.dim, width))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_ND = x_BSD.flatten(0, 1)
        scores_NX = self.router(x_ND).softmax(dim=-1)
        weights_NJ, chosen_NJ = scores_NX.topk(self.per_token, dim=-1)
        weights_NJ = weights_NJ / weights_NJ.sum(dim=-1, keepdim=True)
        compute = self._grouped if self.is_grouped else self._loop
        return compute(x_ND, chosen_NJ, weights_NJ).view_as(x_BSD)

    def _loop(self, x_ND: Tensor, chosen_NJ: Tensor, weights_NJ: Tensor) -> Tensor:
        y_ND = torch.zeros_like(x_ND)
        for number in range(len(self.gate_proj)):
            tokens, places = torch.where(chosen_NJ == number)
            x = x_ND[tokens]
            hidden = F.silu(x @ self.gate_proj[number].T) * (x @ self.up_proj[number].T)
            y_ND.index_add_(
                0, tokens, hidden @ self.down_proj[number].T * weights_NJ[tokens, places, None]
            )
        return y_ND

    def _grouped(self, x_ND: Tensor, chosen_NJ: Tensor, weights_NJ: Tensor) -> Tensor:
        choices_R = chosen_NJ.flatten()
        order_R = choices_R.argsort()
        ends_X = choices_R.bincount(minlength=len(self.gate_proj)).cumsum(0).int()
        tokens_R = order_R // self.per_token
        rows_RD = x_ND[tokens_R]
        gate_RF = F.grouped_mm(rows_RD, self.gate_proj.transpose(-2, -1), offs=ends_X)
        up_RF = F.grouped_mm(rows_RD, self.up_proj.transpose(-2, -1), offs=ends_X)
        results_RD = F.grouped_mm(
            F.silu(gate_RF) * up_RF, self.down_proj.transpose(-2, -1), offs=ends_X
        )
        weighted_RD = results_RD * weights_NJ.flatten()[order_R, None]
        return torch.zeros_like(x_ND).index_add_(0, tokens_R, weighted_RD)


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=generator)


def build_ours(sizes: ModelSizes) -> Step:
    settings = TrainerSettings(
        device="cpu",
        compute_dtype="float32",
        micro_batch=SEQUENCES,
        seq_len=SEQ_LEN,
        seed=SEED,
        total_steps=10**6,
    )
    config = OPTIMIZER.model_copy(update={"tokens_per_step": SEQUENCES * SEQ_LEN})
    trainer = Trainer(
        sizes, config, IslandMesh(Degrees(), "cpu"), ParallelConfig(compile=False), settings
    )

    def step(number: int) -> float:
        result = trainer.step([batch(number)])
        assert result.loss is not None, "a step was skipped"
        return result.loss

    return step


def plain_loop(model: nn.Module) -> Step:
    """Return the step of a plain loop around a model that maps tokens to logits."""
    with_loss = WithLoss(model)
    optimizer = plain_optimizer(with_loss)
    return lambda number: plain_step(with_loss, optimizer, [batch(number)], torch.float32)


def build_plain(sizes: ModelSizes, weights: dict[str, Tensor], *, is_grouped: bool) -> Step:
    model = PlainLlama(sizes, SEQ_LEN)
    for layer in model.layers:
        layer.ffn = PlainMixture(sizes, is_grouped=is_grouped)
    renamed = {}
    for name, tensor in weights.items():
        if not name.endswith("router.bias"):
            renamed[name.removesuffix(".weight") if ".experts." in name else name] = tensor
    model.load_state_dict(
        {name.replace(".ffn.experts.", ".ffn."): tensor for name, tensor in renamed.items()}
    )
    for layer in model.layers:
        layer.forward = _forward_of(layer)
    return plain_loop(model)


def _forward_of(layer: nn.Module) -> Callable[..., Tensor]:
    """Return the forward of a plain block whose feed-forward is a mixture."""
    block = layer
    assert isinstance(block, PlainBlock), "the layers of a plain decoder"
    mixture = block.ffn

    def forward(x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        x_BSD = block.attend(x_BSD, cos_SP, sin_SP)
        return x_BSD + mixture(block.ffn_norm(x_BSD))

    return forward


def build_transformers(sizes: ModelSizes, weights: dict[str, Tensor]) -> Step:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        params = {
            name: tensor for name, tensor in weights.items() if not name.endswith("router.bias")
        }
        save_model(unstack(params), Export(sizes, SEQ_LEN, "bytes"), Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
    return plain_loop(Logits(model))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--dim", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    experts = ExpertsConfig(number=args.experts, per_token=2, dim=args.dim // 2)
    heads = args.dim // 64
    sizes = ModelSizes(
        dim=args.dim,
        num_layers=LAYERS,
        num_heads=heads,
        num_kv_heads=heads // 2,
        ffn_dim=args.dim // 2,
        vocab_size=VOCAB,
        experts=experts,
    )
    model = Transformer(sizes, torch.arange(SEQ_LEN))
    initialise(LocalParams(model, [model]), [model], SEED)
    weights = model.state_dict()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steps = {
        "loop": build_plain(sizes, weights, is_grouped=False),
        "grouped": build_plain(sizes, weights, is_grouped=True),
        "ours": build_ours(sizes),
        "transformers": build_transformers(sizes, weights),
    }
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: step(0) for name, step in steps.items()}
    for number in range(1, args.steps + 1):
        for name, step in steps.items():
            began = time.process_time()
            step(number)
            speeds[name].append(SEQUENCES * SEQ_LEN / (time.process_time() - began))
    print(
        f"{args.experts} experts of width {args.dim // 2}, two per token, dim {args.dim}, {LAYERS} "
        "layers, fp32"
    )
    print(f"{'what':<14}{'first loss':>11}{'tokens/CPU-s':>14}{'ratio to loop':>15}")
    for name, values in speeds.items():
        ratio = median(ours / loop for ours, loop in zip(values, speeds["loop"], strict=True))
        print(f"{name:<14}{losses[name]:>11.5f}{median(values):>14.0f}{ratio:>15.2f}")
        if abs(losses[name] / losses["loop"] - 1) > TOLERANCE:
            sys.exit(f"{name} begins with another loss than loop, so it is another model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
