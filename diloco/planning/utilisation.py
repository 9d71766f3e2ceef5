"""Compute utilisation over a link of given bandwidth, by the model in the appendix of Streaming
DiLoCo (2501.18512).

    inner step     fwd 1 .. fwd L, then from layer L to 1: gradients of its input (not for layer 1)
                   and of its weights
    node           each of these; takes step_seconds / 3L, one after the other
    sync           in a step that syncs a layer, its weight gradient enters the link's queue as soon
                   as it is computed
    link           sends one message at a time, in order; each takes params / L x bits / bandwidth
    merge          a layer's forward waits for the layer's sync from `1 + delay` steps before

Utilisation is compute / time once the steps repeat. The model includes only one-way bytes. It
leaves out the number of islands, latency, codec and memory. diloco/planning/predict.py models this
trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MAX_CYCLES = 64
LAYERS_PER_FRAGMENT = 3


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model whose parameters are all in layers of equal size."""

    num_layers: int
    num_params: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Method:
    """A sync schedule: fragment i is sent at steps with step % inner_steps == offsets[i]."""

    inner_steps: int
    fragments: tuple[tuple[int, ...], ...]
    """The layers of each fragment, numbered from 0."""
    offsets: tuple[int, ...]
    delay: int = 0
    """Inner steps that a sync may take in addition to the one it starts in (tau)."""
    bits: float = 16.0
    """Bits per parameter on the link."""


def diloco(model: Model, inner_steps: int, *, delay: int = 0, bits: float = 16.0) -> Method:
    """Sync all layers in one of `inner_steps` steps."""
    layers = tuple(range(model.num_layers))
    return Method(
        inner_steps=inner_steps, fragments=(layers,), offsets=(0,), delay=delay, bits=bits
    )


def streaming(
    model: Model, inner_steps: int, *, fragments: int | None = None, delay: int = 0,
    bits: float = 16.0,
    pattern: str = "strided",
) -> Method:  # fmt: skip
    """Sync each fragment at its own step, if there are enough steps. By default fragments have
    three layers.

    As in the paper the embedding gets a turn as well, but its bytes are not counted.
    """
    count = fragments or -(-model.num_layers // LAYERS_PER_FRAGMENT)
    layers = range(model.num_layers)
    bounds = [i * model.num_layers // count for i in range(count + 1)]
    strided = [layers[i::count] for i in range(count)]
    sequential = [layers[a:b] for a, b in pairwise(bounds)]
    layer_sets = {"strided": strided, "sequential": sequential}[pattern]
    period = max(inner_steps // (count + 1), 1)
    offsets = tuple(i * period % inner_steps for i in range(count))
    return Method(
        inner_steps=inner_steps, fragments=tuple(map(tuple, layer_sets)), offsets=offsets,
        delay=delay, bits=bits
    )  # fmt: skip


def utilisation(model: Model, method: Method, gbits: np.ndarray) -> np.ndarray:
    """Return the share of the time spent computing in steady state, for each bandwidth (1-D,
    Gbit/s).
    """
    link = _Link(model, method, gbits)
    seconds = np.zeros_like(gbits)
    for cycle in range(MAX_CYCLES):
        before = seconds
        started = link.now
        for step in range(cycle * method.inner_steps, (cycle + 1) * method.inner_steps):
            link.step(step)
        seconds = link.now - started
        # The first wait for a layer's sync may be in a later cycle than the one that sent it.
        if cycle * method.inner_steps > method.delay + 1 and np.allclose(
            seconds, before, rtol=1e-9, atol=0.0
        ):
            break
    return method.inner_steps * (3 * model.num_layers - 1) * link.node_seconds / seconds


class _Link:
    """A run over links of many bandwidths at once: every time is an array with one element per
    bandwidth.
    """

    def __init__(self, model: Model, method: Method, gbits: np.ndarray) -> None:
        self.now = np.zeros_like(gbits)
        self.node_seconds = model.step_seconds / (3 * model.num_layers)
        self._method = method
        self._num_layers = model.num_layers
        self._layer_seconds = model.num_params / model.num_layers * method.bits / (gbits * 1e9)
        self._free_at = np.zeros_like(gbits)
        self._due: dict[int, dict[int, np.ndarray]] = {}
        """Arrival time of the sync that a layer's forward waits for, by inner step and layer."""
        self._layers_by_step = [self._layers_at(step) for step in range(method.inner_steps)]

    def step(self, number: int) -> None:
        """Simulate one inner step."""
        due = self._due.pop(number, {})
        self._compute(sorted(due), lambda layer: self._wait(due[layer]), self._num_layers)
        layers = self._layers_by_step[number % self._method.inner_steps]
        if not layers:
            self.now = self.now + (2 * self._num_layers - 1) * self.node_seconds
            return
        sent = self._due.setdefault(number + 1 + self._method.delay, {})
        ends = {self._backward_nodes(layer): layer for layer in layers}
        self._compute(
            sorted(ends), lambda node: self._send(sent, ends[node]), 2 * self._num_layers - 1
        )

    def _compute(
        self, stops: Sequence[int], at_stop: Callable[[int], None], num_nodes: int
    ) -> None:
        """Run nodes in order, and call `at_stop` before each node (0-based) in `stops`."""
        done = 0
        for stop in stops:
            self.now = self.now + (stop - done) * self.node_seconds
            done = stop
            at_stop(stop)
        self.now = self.now + (num_nodes - done) * self.node_seconds

    def _wait(self, until: np.ndarray) -> None:
        self.now = np.maximum(self.now, until)

    def _send(self, sent: dict[int, np.ndarray], layer: int) -> None:
        self._free_at = np.maximum(self._free_at, self.now) + self._layer_seconds
        sent[layer] = self._free_at

    def _backward_nodes(self, layer: int) -> int:
        """Return how many backward nodes run until the gradient of the layer's weights is
        computed.
        """
        return 2 * (self._num_layers - layer) - (layer == 0)

    def _layers_at(self, step: int) -> list[int]:
        pairs = zip(self._method.fragments, self._method.offsets, strict=True)
        return [layer for layers, offset in pairs if offset == step for layer in layers]
