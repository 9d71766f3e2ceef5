"""Compute utilisation over a link of some bandwidth, by the model of Streaming DiLoCo's appendix (2501.18512).

    inner step     fwd 1 .. fwd L, then from layer L to 1: gradient of its input (but of layer 1's), of its weights
    each of them   step_seconds / 3L; one after the other
    sync           at a step that syncs a layer, its weights' gradient enters the link's queue when it is there
    link           one message at a time, in order; params / L x bits / bandwidth each
    merge          a layer's forward waits for its sync `1 + delay` steps before

Utilisation is compute / time once inner steps repeat themselves. The model knows one-way bytes alone: no islands, no
latency, no codec, no memory; diloco/planning/predict.py is the model of this trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

GRID_GBITS = np.logspace(-1, 3, 50)
"""Bandwidths that the paper's table tries, Gbit/s."""
MAX_CYCLES = 64
LAYERS_PER_FRAGMENT = 3


@dataclass(frozen=True, kw_only=True)
class Model:
    """What computes: all parameters are in layers of one size."""

    num_layers: int
    num_params: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is sent when: fragment i, a set of layers, at steps with step % inner_steps == offsets[i]."""

    inner_steps: int
    fragments: tuple[tuple[int, ...], ...]
    """Layers from 0 on."""
    offsets: tuple[int, ...]
    delay: int = 0
    """Inner steps that a sync may take beside the one it is in: tau."""
    bits: float = 16.0
    """Of a parameter on the link."""


def data_parallel(model: Model, bits: float = 16.0) -> Method:
    """Every layer in every step."""
    return diloco(model, 1, bits=bits)


def diloco(model: Model, inner_steps: int, *, delay: int = 0, bits: float = 16.0) -> Method:
    """All layers in one step of `inner_steps`."""
    layers = tuple(range(model.num_layers))
    return Method(inner_steps=inner_steps, fragments=(layers,), offsets=(0,), delay=delay, bits=bits)


def streaming(
    model: Model, inner_steps: int, *, fragments: int | None = None, delay: int = 0, bits: float = 16.0,
    pattern: str = "strided",
) -> Method:  # fmt: skip
    """Each fragment at a step of its own, if there are enough; `fragments` None: of three layers each.

    As in the paper the embedding takes a turn, too, but its bytes are not counted.
    """
    count = fragments or -(-model.num_layers // LAYERS_PER_FRAGMENT)
    every = range(model.num_layers)
    bounds = [i * model.num_layers // count for i in range(count + 1)]
    strided = [every[i::count] for i in range(count)]
    neighbours = [every[a:b] for a, b in pairwise(bounds)]
    made = {"strided": strided, "sequential": neighbours}[pattern]
    period = max(inner_steps // (count + 1), 1)
    offsets = tuple(i * period % inner_steps for i in range(count))
    return Method(
        inner_steps=inner_steps, fragments=tuple(map(tuple, made)), offsets=offsets, delay=delay, bits=bits
    )  # fmt: skip


def utilisation(model: Model, method: Method, gbits: np.ndarray = GRID_GBITS) -> np.ndarray:
    """Share of the time that computes, at each bandwidth (1-D, Gbit/s), in steady state."""
    link = _Link(model, method, gbits)
    seconds = np.zeros_like(gbits)
    for cycle in range(MAX_CYCLES):
        before, started = seconds, link.now
        for step in range(cycle * method.inner_steps, (cycle + 1) * method.inner_steps):
            link.step(step)
        seconds = link.now - started
        # What is sent in a cycle may be waited for in a later one.
        if cycle * method.inner_steps > method.delay + 1 and np.allclose(seconds, before, rtol=1e-9, atol=0.0):
            break
    return method.inner_steps * (3 * model.num_layers - 1) * link.node_seconds / seconds


def last_below(shares: np.ndarray, target: float) -> int:
    """Index of the last of GRID_GBITS, with these utilisations, that is still below `target`; -1: none is."""
    return int(np.argmax(shares >= target)) - 1 if (shares >= target).any() else len(shares) - 1


def printed(index: int) -> str:
    """A bandwidth of GRID_GBITS as the paper prints it: rounded to two digits, then to one."""
    return f"{round(GRID_GBITS[index], 2):.1f}" if index >= 0 else f"<{GRID_GBITS[0]:.1f}"


class _Link:
    """A training over links of many bandwidths at once: every time is an array, one element a bandwidth."""

    def __init__(self, model: Model, method: Method, gbits: np.ndarray) -> None:
        self.now = np.zeros_like(gbits)
        self.node_seconds = model.step_seconds / (3 * model.num_layers)
        self._method, self._num_layers = method, model.num_layers
        self._layer_seconds = model.num_params / model.num_layers * method.bits / (gbits * 1e9)
        self._free_at = np.zeros_like(gbits)
        self._due: dict[int, dict[int, np.ndarray]] = {}
        """By inner step and layer: when what its forward waits for is there."""
        self._synced = [self._layers_at(step) for step in range(method.inner_steps)]

    def step(self, number: int) -> None:
        """One inner step."""
        due = self._due.pop(number, {})
        self._compute(sorted(due), lambda layer: self._wait(due[layer]), self._num_layers)
        layers = self._synced[number % self._method.inner_steps]
        if not layers:
            self.now = self.now + (2 * self._num_layers - 1) * self.node_seconds
            return
        sent = self._due.setdefault(number + 1 + self._method.delay, {})
        ends = {self._backward_nodes(layer): layer for layer in layers}
        self._compute(sorted(ends), lambda node: self._send(sent, ends[node]), 2 * self._num_layers - 1)

    def _compute(self, stops: Sequence[int], at_stop: Callable[[int], None], num_nodes: int) -> None:
        """Nodes in order, with something to do before node `stop` (0-based) of each of `stops`."""
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
        """Nodes of the backward pass that are done when the layer's weights have their gradient."""
        return 2 * (self._num_layers - layer) - (layer == 0)

    def _layers_at(self, step: int) -> list[int]:
        pairs = zip(self._method.fragments, self._method.offsets, strict=True)
        return [layer for layers, offset in pairs if offset == step for layer in layers]
