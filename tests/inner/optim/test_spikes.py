"""When a loss is a spike."""

from inner.config import SpikeConfig
from inner.optim.spikes import SpikeWatch

NORMAL = [2.0, 2.2, 1.8, 2.1, 1.9, 2.0]


def watch(**changes: object) -> SpikeWatch:
    """A watch that knows NORMAL."""
    found = SpikeWatch(SpikeConfig.model_validate({"steps": len(NORMAL), **changes}))
    assert [found.observe(loss) for loss in NORMAL] == [None] * len(NORMAL)
    return found


def test_a_loss_is_a_spike_from_so_many_deviations_above_the_mean():
    # The standard deviation of NORMAL is 0.1414.
    assert watch(deviations=3).observe(2.42) is None
    spike = watch(deviations=3, action="skip").observe(2.43)
    assert spike is not None and spike.action == "skip" and round(spike.deviations, 2) == 3.04


def test_a_low_loss_is_no_spike():
    assert watch(deviations=0.1).observe(0.1) is None


def test_nothing_is_a_spike_before_enough_losses_are_known():
    assert SpikeWatch(SpikeConfig(steps=7)).observe(100.0) is None
    found = SpikeWatch(SpikeConfig(steps=7))
    assert [found.observe(loss) for loss in [*NORMAL, 50.0]] == [None] * 7


def test_losses_that_rise_for_good_are_soon_normal():
    found = watch(deviations=3)
    spikes = [found.observe(loss + 5) for loss in NORMAL * 2]
    assert spikes[0] is not None and spikes[3:] == [None] * (len(spikes) - 3)


def test_a_watch_goes_on_from_saved_losses():
    first, second = watch(deviations=3), SpikeWatch(SpikeConfig(steps=len(NORMAL), deviations=3))
    second.losses = first.losses
    assert second.observe(2.43) == first.observe(2.43) is not None
