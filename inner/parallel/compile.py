"""torch.compile for blocks. One graph serves all blocks and compiles in seconds; a whole model
would take minutes.
"""

import logging

from torch import nn

from inner.config import ParallelConfig
from inner.errors import InputError
from inner.mesh import Degrees
from inner.parallel.layout_check import find_compile_obstacle

log = logging.getLogger(__name__)


def is_compiled(parallel: ParallelConfig, degrees: Degrees, device_type: str) -> bool:
    """Return whether blocks are compiled: as the config says, or with auto if it is of use and
    triton is installed.
    """
    if parallel.compile != "auto":
        return parallel.compile
    return is_worth_compiling(parallel, degrees, device_type) and _has_triton()


def is_worth_compiling(parallel: ParallelConfig, degrees: Degrees, device_type: str) -> bool:
    """Return whether auto compiles: on CUDA, unless torch is known to fail or to make several
    graphs of a block.
    """
    is_whole = degrees.cp == 1
    return device_type == "cuda" and is_whole and find_compile_obstacle(parallel, degrees) is None


def compile_blocks(model: nn.Module, device_type: str) -> None:
    """Compile the blocks in `model.layers` at their first forward. Raises InputError if no compiler
    is available.

    Call it after tensor parallelism and recomputation, before FSDP. The input of a block must not
    be an asynchronous tensor, on which the compiled backward fails ("'Tensor' object has no
    attribute '_local_tensor'").

    Known limits of torch 2.13: the exchange of context parallelism runs eagerly between two graphs,
    and with recomputation around it the whole block runs eagerly. With tensor parallelism,
    recomputation must be none or selective, as otherwise the compiler tries to keep a DeviceMesh
    for the backward. A schedule that splits the backward (zero bubble) cannot run twice through a
    compiled backward.
    """
    _check_compiler(device_type)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_tell_of_limit)
    for layer in model.get_submodule("layers").children():
        layer.compile()


def _tell_of_limit(record: logging.LogRecord) -> bool:
    """Explain torch's message about its limit on graphs, and what it means for the run. Returns
    True, so all messages pass.
    """
    if "recompile_limit" in record.getMessage():
        log.warning(
            "island.parallel.compile: torch.compile has reached its limit of graphs for a "
            "function; for inputs of new shapes, the function runs uncompiled from now on, slower "
            "but with the same numbers. Keep data.seq_len and island.micro_batch fixed, or set "
            "compile to false. torch's message: %s",
            record.getMessage().replace("\n", " "),
        )
    return True


def _check_compiler(device_type: str) -> None:
    # Imported here because these modules take a second to import, and only compilation needs them.
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if device_type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            compiler = config.cpp.cxx[-1]
            raise InputError(
                f"parallel.compile: needs a C++ compiler on a CPU, but {compiler!r} cannot be run; "
                "install one "
                "(apt install g++), or name yours in CXX, or set parallel.compile to false"
            ) from None
    elif not _has_triton():
        raise InputError(
            "parallel.compile: needs triton on a GPU (compute capability 7.0 or later); pip "
            "install triton, or set parallel.compile to false"
        )


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()
