"""torch.compile for blocks: one graph serves all of them and compiles in seconds; a whole model takes minutes."""

from torch import nn

from inner.errors import InputError


def compile_blocks(model: nn.Module, device_type: str) -> None:
    """Compile the blocks in `model.layers`, at their first forward. Raises InputError if no compiler is available.

    Call it after tensor parallelism and recomputation, before FSDP. The input of a block must not be an asynchronous
    tensor, on which the compiled backward fails ("'Tensor' object has no attribute '_local_tensor'").

    Known limits of torch 2.13: the exchange of context parallelism runs eagerly between two graphs, and with
    recomputation around it the whole block does. With tensor parallelism, recomputation must be none or selective,
    as otherwise the compiler tries to keep a DeviceMesh for the backward. A schedule that splits the backward (zero
    bubble) cannot run twice through a compiled one.
    """
    _check_compiler(device_type)
    for layer in model.get_submodule("layers").children():
        layer.compile()


def _check_compiler(device_type: str) -> None:
    # Imported here because these take a second and only compilation needs them.
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device_type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            compiler = config.cpp.cxx[-1]
            raise InputError(
                f"parallel.compile: needs a C++ compiler on a CPU, and {compiler!r} cannot be run; install one "
                "(apt install g++), or name yours in CXX, or set parallel.compile to false"
            ) from None
    elif not has_triton():
        raise InputError(
            "parallel.compile: needs triton on a GPU (compute capability 7.0 or later); pip install triton, "
            "or set parallel.compile to false"
        )
