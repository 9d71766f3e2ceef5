"""One inner step of a rank on an accelerator that computes nothing. It shows memory, traffic and
host reads at any size.

    accelerator.py     the device: torch accepts it as an accelerator, and tensors on it have shapes
                       but no values
    world.py           makes the process one rank of an island of any size, whose other ranks do not
                       exist
    comm_counter.py    counts the bytes that a rank sends
    live_bytes.py      counts memory on a device
    step_tracker.py    counts memory, and copies and reads between device and host
    case.py            the input and the result of a dry run
    routes.py          gives numbers of rows that ranks of ep would exchange
    kernels.py         makes torch choose the kernels that it chooses for CUDA
    rehearsal.py       builds the trainer and makes the step, with the unmodified trainer and a CPU
                       build of torch

All of this changes the process permanently, so run it in a process of its own (`python -m
inner.dry_run`, see __main__.py).
"""
