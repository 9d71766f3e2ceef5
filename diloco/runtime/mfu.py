"""The model FLOPs utilisation (MFU) of an island, and the peak to which it is relative."""

from dataclasses import dataclass, replace

import torch

from diloco.config.schema import IslandConfig, RunConfig
from diloco.planning.mesh.gpus import find_sheet
from diloco.records.logbook import Logbook
from diloco.runtime.devices.gpus import count_sharers
from inner.data.corpus import Corpus
from inner.flops import flops_per_token
from inner.measure.peak_flops import peak_flops, utilisation
from inner.model.sizes import OwnModel, resolve_model


@dataclass(frozen=True)
class MfuMeter:
    """Computes an island's model FLOPs utilisation from its tokens per second."""

    flops_per_token: float
    peak: float | None
    """Peak FLOP/s of one rank; None if it is not known for this device and compute dtype, or not
    used."""
    num_ranks: int
    source: str = ""
    """The peak and its source, as text; empty if it is not used."""

    def at_length(self, config: RunConfig, corpus: Corpus) -> "MfuMeter":
        """Return the meter for sequences of this config's length."""
        model = resolve_model(config.model, corpus.vocab_size)
        if isinstance(model, OwnModel):
            return self
        return replace(self, flops_per_token=flops_per_token(model, config.data.seq_len).total)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilisation, defined as in inner/flops.py."""
        if self.peak is None:
            return None
        return utilisation(self.flops_per_token, tokens_per_second, self.num_ranks, self.peak)


def build_mfu_meter(
    config: RunConfig, island: IslandConfig, corpus: Corpus, device: str
) -> MfuMeter:
    """Return the meter of an island with this config. Measuring the device's peak takes less than a
    second.

    The FLOPs of an own model are not known, so its utilisation is None.
    """
    model = resolve_model(config.model, corpus.vocab_size)
    if isinstance(model, OwnModel):
        return MfuMeter(0.0, None, island.ranks)
    flops = flops_per_token(model, config.data.seq_len)
    peak, source = find_peak(device, island.resolve_compute_dtype(device), count_sharers())
    return MfuMeter(flops.total, peak, island.ranks, source)


def find_peak(device: str, dtype: str, num_sharers: int) -> tuple[float | None, str]:
    """Return the peak FLOP/s of one rank (None if it is not known), and its source as text.

    It is measured, unless several islands share the device: then a measurement would depend on the
    load of the others.
    """
    if num_sharers > 1:
        return peak_by_sheet(torch.cuda.get_device_name(device), dtype, num_sharers)
    peak = peak_flops(device, dtype)
    return peak, describe_peak(peak, dtype, f"measured on {device}")


def peak_by_sheet(device_name: str, dtype: str, num_sharers: int) -> tuple[float | None, str]:
    """Return what find_peak returns, from the data sheet of a GPU that several islands share.
    Data sheets list products in bf16, which are as fast in float16.
    """
    sheet = find_sheet(device_name) if dtype in ("bfloat16", "float16") else None
    source = (
        f"no data sheet of {device_name!r} is known here"
        if sheet is None
        else f"by the {sheet.source.partition(';')[0]}"
    )
    peak = None if sheet is None else sheet.flops
    return peak, describe_peak(
        peak, dtype, f"{source}; not measured, because {num_sharers} islands share the GPU"
    )


def describe_peak(peak: float | None, dtype: str, source: str) -> str:
    """Return a text about the peak to which utilisations are relative."""
    what = (
        "mfu is unknown"
        if peak is None
        else f"mfu is relative to {peak / 1e12:.3g} TFLOP/s per rank"
    )
    return f"{what} in {dtype}, {source}"


def note_peak(book: Logbook, speed: MfuMeter | None) -> None:
    """Write to the logbook to which peak utilisations are relative. Only a leader has a meter."""
    if speed is not None and speed.source:
        book.note("peak", speed.source)
