"""Simulate a row's wall clock with each island on its own machine, on links of a given speed.

An inner step takes as long as on one core of this machine, or as long as the experiment's file
says. The rest is predicted: for islands by diloco/planning/predict.py, and for data-parallel
training as a ring all-reduce of bf16 gradients after each step, which does not overlap with the
step.
"""

from dataclasses import dataclass

from diloco.config.check import model_specs
from diloco.experiments.definition.rows import Row
from diloco.overview.traffic import data_parallel_bytes_per_step
from diloco.planning.predict import Case, LinkSpeed, find_payload_share, predict
from inner.model.sizes import BYTE_VOCAB_SIZE
from outer.cost import measure_host_speed

TRANSPORT = "gloo"
"""The transport whose share of a link is used, because it was measured; islands of one process have
no links."""


@dataclass(frozen=True)
class Machines:
    """The machines of the simulated run: one for each island, and a given number for data-parallel
    training.
    """

    num_machines: int
    link: LinkSpeed


def seconds_per_step(row: Row, step_seconds: float, machines: Machines) -> float:
    """Return the seconds of an inner step with its share of the communication.

    `step_seconds`: time that one machine needs for its share of the step's tokens.
    """
    outer = row.config.outer.model_copy(update={"transport": TRANSPORT})
    if row.is_data_parallel:
        return step_seconds + all_reduce_seconds(row, machines)
    specs = tuple(model_specs(row.config.run, row.config.model.vocab_size or BYTE_VOCAB_SIZE))
    case = Case(
        outer=outer,
        specs=specs,
        num_islands=len(row.config.islands),
        step_seconds=step_seconds,
        link=machines.link,
        speed=measure_host_speed(outer),
    )
    prediction = predict(case)
    return prediction.total_seconds / prediction.inner_steps


def all_reduce_seconds(row: Row, machines: Machines) -> float:
    """Return the seconds of a ring all-reduce of bf16 gradients: 2 (N - 1) messages of 1/N of their
    size, one by one.
    """
    others = machines.num_machines - 1
    if others == 0:
        return 0.0
    outer = row.config.outer.model_copy(update={"transport": TRANSPORT})
    share = find_payload_share(outer, machines.num_machines)
    sent_bits = 8 * data_parallel_bytes_per_step(row.num_params, machines.num_machines)
    return sent_bits / (machines.link.bits_per_second * share) + others * machines.link.rtt_seconds
