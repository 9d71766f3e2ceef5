"""What an island's utilisation is relative to, and the data-parallel baseline's numbers."""

import pytest

from diloco.config.schema import Config
from diloco.planning.mesh.gpus import GPUS, find_gpu, find_sheet
from diloco.runtime.mfu import MfuMeter, find_peak, peak_by_sheet
from diloco.train import baseline
from tests.swarm import swarm


def test_the_peak_of_a_shared_gpu_is_that_of_its_data_sheet():
    peak, source = peak_by_sheet("NVIDIA H100 80GB HBM3", "bfloat16", 3)
    assert peak == find_gpu("h100").flops
    assert source.startswith(
        "mfu is relative to 989 TFLOP/s per rank in bfloat16, by the NVIDIA H100 SXM data sheet; "
    )
    assert source.endswith("not measured, because 3 islands share the GPU")


@pytest.mark.parametrize(
    ("name", "dtype"), [("NVIDIA H100 80GB HBM3", "float32"), ("NVIDIA H100 PCIe", "bfloat16")]
)
def test_a_shared_gpu_without_a_known_peak_has_no_utilisation_and_says_so(name, dtype):
    peak, source = peak_by_sheet(name, dtype, 2)
    assert peak is None and source.startswith(
        f"mfu is unknown in {dtype}, no data sheet of {name!r} is known here"
    )
    assert MfuMeter(1.0, peak, 1, source).mfu(1.0) is None


def test_the_peak_of_a_device_of_its_own_is_measured():
    peak, source = find_peak("cpu", "float32", 1)
    assert peak is not None and source.endswith("TFLOP/s per rank in float32, measured on cpu")


def test_each_data_sheet_is_found_by_its_own_names():
    assert all(find_sheet(name) is gpu for gpu in GPUS.values() for name in gpu.names)


def test_a_baseline_on_one_rank_trains_on_the_same_batches_and_says_what_its_peak_is(tmp_path):
    def work(config: Config, _: int) -> None:
        baseline(config, num_islands=2, num_ranks=config.island.ranks)

    found = []
    for ranks in (1, 2):
        settings = f"name=of-{ranks}", f"island.ranks={ranks}", "outer.rounds=2"
        with swarm(tmp_path, *settings, islands=[{}, {}]) as islands:
            trained = islands.start(0, work)
            trained.finish()
            trained.folder = tmp_path / f"of-{ranks}" / "baseline"
            found.append(trained)
    steps, evals = ([each.records(kind) for each in found] for kind in ("step", "eval"))
    assert (
        [record["tokens"] for record in steps[0]]
        == [record["tokens"] for record in steps[1]]
        == [1024, 2048, 3072, 4096]
    )
    for one, two in (*zip(*steps, strict=True), *zip(*evals, strict=True)):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert "**baseline** peak: mfu is relative to" in (tmp_path / "of-1" / "LOGBOOK.md").read_text()
