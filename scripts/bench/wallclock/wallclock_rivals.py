"""The machines and rivals of scripts/bench/wallclock/wallclock.py, among them torch's DDP."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from diloco.config.schema import IslandConfig, RunConfig
from diloco.runtime.corpus import load_corpus
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus
from inner.model.init import initialise
from inner.model.sizes import resolve_sizes
from inner.model.transformer import Transformer
from inner.optim.build import build_optimizers
from inner.params import LocalParams

LIMIT = timedelta(seconds=600)
"""Limit of each wait for other machines."""


class Machine:
    """One machine: its model, optimizer and text, and its place among the others."""

    def __init__(self, run: RunConfig, island: IslandConfig, rank: int, count: int) -> None:
        self.run = run
        self.island = island
        self.rank = rank
        self.count = count
        self.corpus: Corpus = load_corpus(run, island)
        self.model = build_model(run, self.corpus)
        names = [name for name, _ in self.model.named_parameters()]
        (self.optimizer,) = build_optimizers([self.model], names, run.optimizer)
        self.stepped_at = 0.0
        """Unix time at the end of the optimizer's last step.

        torchft averages in a hook after the step.
        """
        self.optimizer.register_step_post_hook(self._note_step)

    def batches(self, num_readers: int) -> IslandBatches:
        """Return the text as the units that islands read.

        With one reader, that is one island with the tokens of all machines.
        """
        num_sequences = (
            self.run.optimizer.tokens_per_step * self.count // num_readers // self.run.data.seq_len
        )
        return IslandBatches(
            self.corpus, self.run.data.seq_len, self.run.seed, num_readers, num_sequences
        )

    def _note_step(self, *_: object) -> None:
        self.stepped_at = time.time()


@dataclass(frozen=True)
class Rival:
    """How the machines train together."""

    forward: nn.Module
    """Maps tokens to the loss. Its backward averages gradients, if they are averaged."""
    no_sync: Callable[[], AbstractContextManager] = nullcontext
    """A context in which the backward does not average gradients."""
    global_params: Callable[[], AbstractContextManager] = nullcontext
    """A context in which the model has the params that all machines share."""
    is_data_parallel: bool = False
    """Whether all machines make each step together; otherwise each trains an island."""


def build_model(run: RunConfig, corpus: Corpus) -> Transformer:
    """Build the run's model with its initial weights, without a mesh."""
    model = Transformer(resolve_sizes(run.model, corpus.vocab_size), torch.arange(run.data.seq_len))
    initialise(LocalParams(model, [model]), [model], run.seed)
    return model


@contextmanager
def open_ddp(machine: Machine) -> Iterator[Rival]:
    """Open torch's DistributedDataParallel over gloo, with its default settings."""
    dist.init_process_group("gloo", timeout=LIMIT)
    model = DistributedDataParallel(machine.model)
    yield Rival(model, no_sync=model.no_sync, is_data_parallel=True)
    dist.destroy_process_group()


def build_fragments(model: nn.Module) -> list[nn.Module]:
    """Return each layer, and all other modules together: each parameter is in one of them."""
    children = dict(model.named_children())
    layers = list(children.pop("layers").children())
    return [*layers, nn.ModuleList(children.values())]


class GlobalParams:
    """The params that all islands have: each parameter's value after the last outer step that
    changed it.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        self._values = {param: param.detach().clone() for param in model.parameters()}
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the global params inside the context."""
        local = {param: param.detach().clone() for param in self._values}
        self._copy(self._values)
        yield
        self._copy(local)

    @torch.no_grad()
    def _note(self, optimizer: Optimizer, *_: object) -> None:
        for param in optimizer.param_groups[0]["params"]:
            self._values[param].copy_(param)

    @torch.no_grad()
    def _copy(self, values: dict[nn.Parameter, torch.Tensor]) -> None:
        for param, value in values.items():
            param.copy_(value)
