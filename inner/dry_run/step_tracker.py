"""Counts what a step does on the dry run's device: bytes alive, and crossings between device and host."""

import traceback
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inner.dry_run.accelerator import DEVICE_TYPE
from inner.dry_run.comm_counter import NAMESPACES

aten = torch.ops.aten
PACKAGE = Path(__file__).parents[1]
DEPTH = 2
"""Number of lines of this package by which the place of a crossing is named."""
_RESIZE = torch.UntypedStorage.resize_
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


class StepTracker(TorchDispatchMode):
    """Sees every operation inside `with StepTracker(alive) as tracker`; the tensors `alive` are there before.

    A value that the host reads from the device does not exist. The reader gets 1.
    """

    def __init__(self, alive: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = 0
        """The most bytes of live tensors on the device."""
        self.crossings: Counter[str] = Counter()
        """Reads by the host and copies between device and host, by what and where."""
        self.misplaced: Counter[str] = Counter()
        """Collectives of tensors that are not on the device."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes: dict[int, int] = {}
        self._now = 0
        self._see(list(alive))

    def __enter__(self) -> "StepTracker":
        # FSDP frees gathered weights so.
        torch.UntypedStorage.resize_ = lambda storage, size: self._resize(storage, size)  # pyright: ignore
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = _RESIZE
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; its operations then come back here.
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        self._note_copy(func, args, kwargs)
        if func.namespace in NAMESPACES:
            self._note_collective(func, args)
        out = func(*args, **kwargs)
        self._see(out)
        return out

    def _read(self, tensor: Tensor) -> int | float:
        if tensor.device.type == DEVICE_TYPE:
            self.crossings[f"read by the host, {_find_place()}"] += 1
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten._to_copy.default:
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
        elif func is aten.copy_.default:
            source, target = args[1].device, args[0].device
        else:
            return
        if source.type != target.type and DEVICE_TYPE in (source.type, target.type):
            way = "to the device" if target.type == DEVICE_TYPE else "to the host"
            self.crossings[f"copied {way}, {_find_place()}"] += 1

    def _note_collective(self, func: Any, args: Any) -> None:
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor) and tensor.device.type != DEVICE_TYPE:
                self.misplaced[f"{func} of a tensor on {tensor.device.type}, {_find_place()}"] += 1

    def _see(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.device.type == DEVICE_TYPE:
                storage = _plain(tensor).untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
                self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._now += size - self._bytes.get(key, 0)
        self._bytes[key] = size
        self.peak_bytes = max(self.peak_bytes, self._now)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        _RESIZE(storage, size)
        if storage._cdata in self._storages:
            self._count(storage)
        return storage

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        self._now -= self._bytes.pop(key, 0)


def _plain(tensor: Tensor) -> Tensor:
    """The plain tensor inside a DTensor or an asynchronous one."""
    while type(tensor) not in PLAIN:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.elem  # pyright: ignore
    return tensor


def _find_place() -> str:
    """The lines of this package that have led here, the innermost first."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE / "dry_run")]
    lines = [f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno}" for frame in own[::-1]]
    return " < ".join(list(dict.fromkeys(lines))[:DEPTH]) or "torch"
