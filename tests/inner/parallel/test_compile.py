"""torch.compile per block: the same numbers as eager, one graph for all blocks, and clear
errors.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inner.config import ParallelConfig, Recompute
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from inner.parallel.compile import compile_blocks, is_compiled, is_worth_compiling
from inner.params import LocalParams
from tests.harness import run_ranks
from tests.inner.small import batch, build_trainer, relative_error, share

# More layers than the variants of one function that torch.compile compiles (8).
SIZES = ModelSizes(
    dim=32, num_layers=9, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61, qk_norm=True
)


@dataclass
class Life:
    """Observations of a rank in one step."""

    loss: float | None
    gradients: list[Tensor]
    num_graphs: int
    breaks: Counter[str]
    names: list[str]


def live(_: int, degrees: Degrees, parallel: ParallelConfig) -> Life:
    trainer = build_trainer(degrees, SIZES, parallel=parallel)
    (model,) = trainer.model_parts
    gradients: list[Tensor] = []

    def keep_gradients(*_: Any) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        gradients.extend(
            grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads
        )

    register_optimizer_step_pre_hook(keep_gradients)
    result = trainer.step(share(trainer, batch(0)))
    names = [spec.name for spec in LocalParams(model, [model]).specs]
    return Life(
        result.loss,
        gradients,
        counters["stats"]["unique_graphs"],
        Counter(counters["graph_break"]),
        names,
    )


def both(degrees: Degrees, recompute: Recompute = "none") -> tuple[Life, Life]:
    """One step in eager mode without recomputation, and one compiled."""
    compiled = ParallelConfig(compile=True, recompute=recompute)
    num_ranks = degrees.num_ranks
    eager = run_ranks(live, num_ranks, degrees, ParallelConfig())
    return eager[0], run_ranks(live, num_ranks, degrees, compiled, timeout_seconds=600)[0]


BLOCK, BLOCK_AND_LOSS = 1, 2
"""Numbers of graphs: over a split vocabulary the loss is not compiled."""
CASES = {
    "one": (Degrees(), "none", BLOCK_AND_LOSS),
}
SLOW_CASES = {
    "fsdp2": (Degrees(dp_shard=2), "none", BLOCK_AND_LOSS),
    "one-selective": (Degrees(), "selective", BLOCK_AND_LOSS),
    "tp2": (Degrees(tp=2), "none", BLOCK),
    "tp2-selective": (Degrees(tp=2), "selective", BLOCK),
    "one-attention": (Degrees(), "attention", BLOCK_AND_LOSS),
    "fsdp2-full": (Degrees(dp_shard=2), "full", BLOCK_AND_LOSS),
}


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)],
)
def lives(request: pytest.FixtureRequest) -> tuple[Life, Life, int]:
    """One step in eager mode, one compiled, and the number of graphs that are to be compiled."""
    degrees, recompute, num_graphs = (CASES | SLOW_CASES)[request.param]
    return *both(degrees, recompute), num_graphs


@needs_compiler
def test_loss_and_gradients_equal_eager(lives: tuple[Life, Life, int]) -> None:
    eager, compiled, _ = lives
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-6)
    assert len(compiled.gradients) == len(eager.gradients) == len(eager.names)
    for name, got, expected in zip(eager.names, compiled.gradients, eager.gradients, strict=True):
        assert relative_error(got, expected) < 1e-5, name


@needs_compiler
def test_all_blocks_are_one_graph_and_the_loss_another(lives: tuple[Life, Life, int]) -> None:
    eager, compiled, num_graphs = lives
    assert (eager.num_graphs, compiled.num_graphs) == (0, num_graphs)
    assert not compiled.breaks


@needs_compiler
def test_names_do_not_change(lives: tuple[Life, Life, int]) -> None:
    eager, compiled, _ = lives
    assert compiled.names == eager.names


def losses_with_documents(_: int, parallel: ParallelConfig) -> tuple[list[float | None], int]:
    """Losses of four steps whose documents differ in number and length, and the number of compiled
    graphs.
    """
    trainer = build_trainer(Degrees(), SIZES, parallel=parallel, eos_id=7)
    losses = [trainer.step(share(trainer, batch(number))).loss for number in range(4)]
    return losses, counters["stats"]["unique_graphs"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_other_documents_need_no_other_graph(recompute: Recompute) -> None:
    (eager, _), (compiled, num_graphs) = (
        run_ranks(losses_with_documents, 1, parallel, timeout_seconds=600)[0]
        for parallel in (ParallelConfig(), ParallelConfig(compile=True, recompute=recompute))
    )
    assert compiled == pytest.approx(eager, rel=1e-5)
    # One is the loss; the third is for any number of documents and any length of the longest.
    assert num_graphs <= 3


@needs_compiler
def test_whoever_runs_into_the_limit_of_graphs_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict()
    compile_blocks(model, "cpu")
    torch._dynamo.reset()
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        caplog.at_level("WARNING", "inner.parallel.compile"),
    ):
        for size in range(2, 4):
            double(torch.ones(size))
        assert not caplog.records
        double(torch.ones(4))
    assert "island.parallel.compile" in caplog.text and "set compile to false" in caplog.text


def test_a_missing_compiler_is_said_with_a_cure() -> None:
    program = (
        "import torch; from inner.parallel.compile import *; "
        "compile_blocks(torch.nn.Module(), 'cpu')"
    )
    environment = os.environ | {"CXX": "/nonexistent/g++"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    message = done.stderr.splitlines()[-1]
    assert message.startswith("inner.errors.InputError: parallel.compile"), done.stderr
    assert "'/nonexistent/g++'" in message and "set parallel.compile to false" in message


@pytest.mark.parametrize(
    "degrees,how,device",
    [
        (Degrees(), {}, "cpu"),
        (Degrees(cp=2), {}, "cuda"),
        (Degrees(tp=2), {"recompute": "full"}, "cuda"),
        (Degrees(pp=2), {"schedule": "zbv"}, "cuda"),
    ],
)
def test_blocks_are_not_compiled_unasked_where_that_fails_or_gains_little(
    degrees: Degrees, how: dict[str, Any], device: str
) -> None:
    assert not is_worth_compiling(ParallelConfig(**how), degrees, device)


def test_blocks_are_compiled_by_themselves_on_cuda() -> None:
    assert is_worth_compiling(
        ParallelConfig(recompute="selective"), Degrees(dp_shard=8, tp=2, pp=2), "cuda"
    )


@pytest.mark.parametrize("choice", [True, False])
def test_whoever_says_whether_to_compile_decides(choice: bool) -> None:
    for degrees, device in ((Degrees(cp=2), "cpu"), (Degrees(dp_shard=8), "cuda")):
        assert is_compiled(ParallelConfig(compile=choice), degrees, device) == choice
