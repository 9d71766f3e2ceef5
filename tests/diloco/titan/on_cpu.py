"""torchtitan's own `torchtitan.train`, on a CPU. Patched here, in tests alone: it has no path
without an accelerator.

python -m tests.diloco.titan.on_cpu --module tests.diloco.titan.small --config llama3 \\
    [OPTIONS OF torchtitan]
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools import utils


def nothing(*_: Any, **__: Any) -> None:
    pass


DEVICE = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=nothing,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 34),
    is_available=lambda: True,
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=nothing,
    set_device=nothing,
    synchronize=nothing,
)


def use_cpu() -> None:
    """Let torchtitan take the CPU for its device. Call it before its other modules are imported."""
    torch.set_num_threads(1)
    utils.device_type = "cpu"
    utils.device_module = DEVICE
    utils.get_local_device = lambda: torch.device("cpu")

    barrier = dist.barrier
    dist.barrier = lambda *given, device_ids=None, **more: barrier(*given, **more)

    dist.all_to_all = exchange

    from torchtitan.distributed import fsdp

    fsdp.disable_fsdp_gradient_division = sum_gradients


def exchange(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> None:
    """As all_to_all, for tensors of different sizes too, which gloo's takes only as one tensor."""
    sizes_in, sizes_out = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
    packed = torch.cat([tensor.reshape(-1) for tensor in inputs])
    received = packed.new_empty(sum(sizes_in))
    dist.all_to_all_single(received, packed, sizes_in, sizes_out, group=group)
    for output, values in zip(outputs, received.split(sizes_in), strict=True):
        output.copy_(values.view_as(output))


def sum_gradients(model: torch.nn.Module) -> None:
    """As torchtitan's own, without the reduction that scales, which gloo does not have."""
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


if __name__ == "__main__":
    use_cpu()
    from torchtitan.train import main

    sys.exit(main())
