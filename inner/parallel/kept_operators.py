"""Selective recomputation: a repeated forward takes the results of expensive operators from the
first forward, and runs all others again.

torch's own contexts for this also require that every other operator runs in both forwards, which
the gathers of weights inside a block do not.
"""

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from inner.model.attention_kernels import VARLEN_OPERATOR
from inner.model.span_attention import SPAN_OPERATOR

# bmm is not in this set: only attention without a fused kernel uses it, and its results have all
# pairs of positions.
KEPT_OPERATORS = {
    getattr(getattr(torch.ops, library), name).default
    for library, names in {
        "aten": (
            "mm",
            "addmm",
            "_grouped_mm",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        "_c10d_functional": (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_reduce",
            "all_to_all_single",
        ),
    }.items()
    for name in names
} | {VARLEN_OPERATOR, SPAN_OPERATOR}

Results = dict[Any, deque[Any]]
"""The results of each operator, in the order of its calls."""


class _Keep(TorchDispatchMode):
    """Keeps the results of expensive operators."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT_OPERATORS:
            # A result itself would keep its graph, which refers to this forward.
            self._results[func].append(tree_map_only(Tensor, torch.Tensor.detach, result))
        return result


class _Reuse(TorchDispatchMode):
    """Returns kept results, each once, instead of running their operators."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT_OPERATORS:
            return func(*args, **(kwargs or {}))
        assert self._results[func], f"a repeated forward calls {func} more often than the first"
        return self._results[func].popleft()


def keep_and_reuse() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return contexts around a forward, and around its repetition."""
    results: Results = defaultdict(deque)
    return _Keep(results), _Reuse(results)
