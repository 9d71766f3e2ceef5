"""Count bytes alive, and copies and reads between device and host, in a step on the dry run's
device.
"""

import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from inner.dry_run.accelerator import DEVICE_TYPE
from inner.dry_run.comm_counter import NAMESPACES
from inner.dry_run.live_bytes import LiveBytes

aten = torch.ops.aten
PACKAGE = Path(__file__).parents[1]
DEPTH = 2
"""Number of this package's stack frames that name the place of a crossing."""


class StepTracker(LiveBytes):
    """Sees every operation inside `with StepTracker(alive) as tracker`. The tensors `alive` exist
    before.

    A value that the host reads from the device does not exist, so the host gets 1 instead.
    """

    def __init__(self, alive: Iterable[Tensor] = ()) -> None:
        super().__init__(alive, DEVICE_TYPE)
        self.crossings: Counter[str] = Counter()
        """Number of reads by the host and of copies between device and host, by kind and place in
        the code."""
        self.misplaced: Counter[str] = Counter()
        """Number of collectives on tensors that are not on the device, by kind and place in the
        code."""

    def __enter__(self) -> "StepTracker":
        super().__enter__()
        return self

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        self._note_copy(func, args, kwargs)
        if func.namespace in NAMESPACES:
            self._note_collective(func, args)
        return super()._run(func, args, kwargs)

    def _read(self, tensor: Tensor) -> int | float:
        if tensor.device.type == DEVICE_TYPE:
            self.crossings[f"read by the host, {_find_place()}"] += 1
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten._to_copy.default:
            source = args[0].device
            target = torch.device(kwargs.get("device") or args[0].device)
        elif func is aten.copy_.default:
            source = args[1].device
            target = args[0].device
        else:
            return
        if source.type != target.type and DEVICE_TYPE in (source.type, target.type):
            way = "to the device" if target.type == DEVICE_TYPE else "to the host"
            self.crossings[f"copied {way}, {_find_place()}"] += 1

    def _note_collective(self, func: Any, args: Any) -> None:
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor) and tensor.device.type != DEVICE_TYPE:
                self.misplaced[f"{func} of a tensor on {tensor.device.type}, {_find_place()}"] += 1


def _find_place() -> str:
    """Return this package's frames of the call stack, the innermost first."""
    frames = [
        frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    own = [
        frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE / "dry_run")
    ]
    lines = [
        f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno}" for frame in own[::-1]
    ]
    return " < ".join(list(dict.fromkeys(lines))[:DEPTH]) or "torch"
