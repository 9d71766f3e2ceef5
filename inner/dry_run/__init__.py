"""One inner step of a rank on an accelerator that computes nothing: its memory, traffic and host reads, at any size.

    accelerator.py     the device: torch believes in it, and tensors on it have shapes and no values
    world.py           the process as one rank of an island of any size, whose other ranks do not exist
    comm_counter.py    counts what a rank sends
    live_bytes.py      counts memory on a device
    step_tracker.py    counts that and crossings between device and host
    case.py            what is rehearsed, and what came of it
    kernels.py         torch's choice of kernels, made as for CUDA
    rehearsal.py       builds the trainer and makes the step; the unmodified trainer, on the CPU build of torch

Everything here changes the process for good: run it in one of its own (`python -m inner.dry_run`, see __main__.py).
"""
