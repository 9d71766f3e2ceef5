"""The compute-utilisation model against the table that its paper prints."""

import numpy as np
import pytest

from diloco.planning.utilisation import Method, Model, diloco, streaming, utilisation

GRID_GBITS = np.logspace(-1, 3, 50)
"""The bandwidths of the paper's table, Gbit/s."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
MODELS = {
    "1B": Model(num_layers=24, num_params=1e9, step_seconds=0.1),
    "10B": Model(num_layers=48, num_params=10e9, step_seconds=0.8),
    "100B": Model(num_layers=108, num_params=100e9, step_seconds=4.9),
}
# 2501.18512, table 4: Gbit/s for TARGETS. Columns: data-parallel, DiLoCo, streaming, with delay 1,
# with 4 bits, too.
PRINTED = {
    "1B": (
        "86.8 152.6 184.2 222.3 569.0",
        "1.4 6.2 13.3 23.3 86.8",
        "1.4 5.2 9.1 16.0 28.1",
        "1.4 4.3 6.2 9.1 11.0",
        "0.4 0.9 1.7 2.0 3.0",
    ),
    "10B": (
        "104.8 222.3 222.3 268.3 471.5",
        "1.7 7.5 16.0 33.9 104.8",
        "1.7 5.2 9.1 13.3 19.3",
        "1.7 3.6 5.2 6.2 7.5",
        "0.4 0.9 1.4 1.4 1.7",
    ),
    "100B": (
        "184.2 323.8 390.7 390.7 471.5",
        "3.0 11.0 23.3 49.4 184.2",
        "2.4 6.2 9.1 11.0 19.3",
        "1.7 3.6 4.3 5.2 5.2",
        "0.5 0.9 1.1 1.1 1.4",
    ),
}
SMALL = Model(num_layers=6, num_params=1e9, step_seconds=1.0)
LIMITLESS = np.array([1e9])


def data_parallel(model: Model, bits: float = 16.0) -> Method:
    """Sync every layer in every step."""
    return diloco(model, 1, bits=bits)


def last_below(shares: np.ndarray, target: float) -> int:
    """Index of the last bandwidth in GRID_GBITS whose utilisation (`shares`) is below `target`; -1
    if none is.
    """
    return int(np.argmax(shares >= target)) - 1 if (shares >= target).any() else len(shares) - 1


def format_gbits(index: int) -> str:
    """A bandwidth of GRID_GBITS in the paper's format: rounded to two decimals, then to one."""
    return f"{round(GRID_GBITS[index], 2):.1f}" if index >= 0 else f"<{GRID_GBITS[0]:.1f}"


def methods_of(model: Model) -> list[Method]:
    """The columns of the table."""
    return [
        data_parallel(model),
        diloco(model, 100),
        streaming(model, 100),
        streaming(model, 100, delay=1),
        streaming(model, 100, delay=1, bits=4),
    ]


def test_the_papers_table_comes_out_but_for_six_neighbours_on_the_grid():
    pairs = []
    for name, model in MODELS.items():
        for method, row in zip(methods_of(model), PRINTED[name], strict=True):
            shares = utilisation(model, method, GRID_GBITS)
            pairs += [
                (last_below(shares, t), want) for t, want in zip(TARGETS, row.split(), strict=True)
            ]
    assert len(pairs) == 75
    assert sum(format_gbits(index) == want for index, want in pairs) >= 69
    assert all(want in [format_gbits(index + step) for step in (-1, 0, 1)] for index, want in pairs)


def test_a_link_without_limit_computes_all_the_time():
    assert utilisation(SMALL, data_parallel(SMALL), LIMITLESS) == pytest.approx(1.0, abs=1e-6)


def test_a_link_that_is_always_busy_gives_its_own_rate():
    # 1e9 x 4 bits in each 10 steps take 40 s at 0.1 Gbit/s, and a new sync is there before the last
    # one has ended.
    method = diloco(SMALL, 10, delay=10, bits=4)
    compute = 10 * 17 / 18
    assert utilisation(SMALL, method, np.array([0.1])) == pytest.approx(compute / 40, rel=1e-6)


def test_a_blocking_sync_is_hidden_by_the_rest_of_its_backward_alone():
    # All layers are sent after a tenth of a second each, the last when the backward has ended.
    model = Model(num_layers=2, num_params=2e9, step_seconds=6.0)
    method = diloco(model, 4, bits=1)
    # Layer 1's gradient is there at node 4 of 5, layer 0's at the end; the first forward waits for
    # it: 10 s at 0.1 Gbit/s each, the first from node 4 on.
    assert utilisation(model, method, np.array([0.1])) == pytest.approx(20 / (20 + 19), rel=1e-6)


def test_a_delay_hides_a_sync_that_it_is_long_enough_for():
    method = diloco(SMALL, 10, delay=2, bits=1)
    assert utilisation(SMALL, method, np.array([0.6])) == pytest.approx(1.0, abs=1e-9)
    assert utilisation(SMALL, method, np.array([0.3])) < 0.95


def test_a_delay_of_a_whole_cycle_hides_all_that_the_link_can_carry():
    method = diloco(SMALL, 10, delay=10, bits=4)
    assert utilisation(SMALL, method, np.array([0.5])) == pytest.approx(1.0, abs=1e-9)


def test_every_layer_is_in_one_fragment_of_either_pattern():
    model = Model(num_layers=10, num_params=1.0, step_seconds=1.0)
    for pattern in ("strided", "sequential"):
        method = streaming(model, 100, fragments=4, pattern=pattern)
        assert sorted(layer for layers in method.fragments for layer in layers) == list(range(10))
        assert len(set(method.offsets)) == 4


def test_more_fragments_than_inner_steps_share_steps():
    method = streaming(MODELS["100B"], 30, delay=1, bits=4)
    assert len(method.fragments) == 36 and max(method.offsets) < 30
    assert utilisation(MODELS["100B"], method, LIMITLESS) == pytest.approx(1.0, abs=1e-6)


def test_a_label_is_the_last_bandwidth_below_the_target():
    shares = np.linspace(0.0, 1.0, 50)
    assert last_below(shares, shares[25]) == 24
    assert format_gbits(24) == f"{GRID_GBITS[24]:.1f}"
    assert format_gbits(last_below(np.ones(50), 0.5)) == "<0.1"
    assert last_below(np.zeros(50), 0.5) == 49
