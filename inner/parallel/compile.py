"""torch.compile for blocks: one graph serves all of them, and takes seconds where a whole model takes minutes."""

from torch import nn

from inner.errors import InputError


def compile_blocks(part: nn.Module, device_type: str) -> None:
    """Compiles the blocks in `part.layers`, at their first forward. Raises InputError where no compiler is at hand.

    Call it after tensor parallelism and recomputation, before FSDP. What enters a block must have arrived: an
    embedding under tensor and sequence parallelism hands out a tensor that is still under way, and the compiled
    backward breaks on that ("'Tensor' object has no attribute '_local_tensor'"), so wait for it before.

    Known limits of torch 2.13. The exchange of context parallelism runs eagerly between two graphs, and with
    recomputation around it the whole block does. With tensor parallelism, recomputation must be none or selective:
    else the compiler tries to keep a DeviceMesh for the backward. A schedule that splits the backward (zero bubble)
    cannot run twice through a compiled one.
    """
    _check_compiler(device_type)
    for layer in part.get_submodule("layers").children():
        layer.compile()


def _check_compiler(device_type: str) -> None:
    # Imported here: these take a second, and only compiling needs them.
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device_type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            wanted = config.cpp.cxx[-1]
            raise InputError(
                f"parallel.compile: needs a C++ compiler on a CPU, and {wanted!r} cannot be run; install one "
                "(apt install g++), or name yours in CXX, or set parallel.compile to false"
            ) from None
    elif not has_triton():
        raise InputError(
            "parallel.compile: needs triton on a GPU (compute capability 7.0 or later); pip install triton, "
            "or set parallel.compile to false"
        )
