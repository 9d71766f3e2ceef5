"""Predict the course of a run that has begun, as `diloco plan` does, from its measured inner steps
and its link.
"""

import math
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigError
from diloco.planning.laws.islands import is_extrapolated, loss_gap
from diloco.watch.view.basis import Basis, find_basis, find_link
from diloco.watch.view.run_view import RunView
from diloco.watch.view.state import state_now
from inner.errors import InputError

if TYPE_CHECKING:
    from diloco.planning.predict import Case, LinkSpeed, Prediction

REFRESH_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction, for JSON. A round sends one fragment; rates are in bits per second."""

    round_seconds: float
    utilisation: float
    """Share of the time in inner steps on the fastest island."""
    round_bytes: float
    """Bytes of payload that an island sends per round."""
    reduce_rate: float | None
    """Payload of a round divided by the time of its reduce; None if nothing is sent."""
    needed_rate: float | None
    """Rate of the slowest link on which the run as configured reaches `target`; None if no link is
    fast enough."""
    target: float
    link_rate: float
    loss_gap: float
    """Loss relative to data-parallel training by the scaling laws of DiLoCo: 0.01 is 1 % worse."""
    is_extrapolated: bool
    """Whether the model is smaller or larger than all models to which the laws were fitted."""
    assumed: tuple[str, ...]
    """The assumptions of the prediction, in words."""


class RunPrediction:
    """The prediction for a run. It is updated after new commits, but not more often than every
    REFRESH_SECONDS.
    """

    def __init__(self, view: RunView) -> None:
        self.view = view
        self._lock = threading.Lock()
        self._rounds = -1
        self._made_at = -math.inf
        self._latest: dict[str, Any] = {}

    def find(self) -> dict[str, Any]:
        """Return the fields of Predicted, or `unknown` with the reason. May be called on any
        thread.

        The first call imports torch and measures for 0.25 s how fast this machine encodes.
        """
        with self._lock:
            rounds = sum(len(island.rows["pace"]) for island in self.view.islands.values())
            if rounds != self._rounds and time.monotonic() - self._made_at > REFRESH_SECONDS:
                self._latest = predict_run(self.view)
                self._rounds = rounds
                self._made_at = time.monotonic()
            return self._latest

    def state(self) -> dict[str, Any]:
        """Return the state of the run as it was last read, with the prediction."""
        return state_now(self.view) | {"predicted": self.find()}


def predict_run(view: RunView) -> dict[str, Any]:
    """Return the fields of Predicted, or `unknown` with the reason."""
    try:
        basis = find_basis(view)
        speed, about_link = find_link(view, basis.config)
        return asdict(compute(basis, speed, (about_link, *basis.words())))
    except (ConfigError, InputError) as error:
        return {"unknown": " ".join(str(error).split())}


def compute(basis: Basis, speed: "LinkSpeed", assumed: tuple[str, ...]) -> Predicted:
    """Return the prediction for links of this speed. Raises ConfigError or InputError if the config
    allows none.
    """
    from diloco.planning.advice import needed_bandwidth
    from diloco.planning.plan import UTILISATION
    from diloco.planning.predict import predict

    case = build_case(basis, speed)
    p = predict(case)
    fragments = case.outer.fragments
    return Predicted(
        round_seconds=p.total_seconds / fragments,
        utilisation=p.utilisation,
        round_bytes=p.sent_bytes / fragments,
        reduce_rate=8 * p.sent_bytes / reduce_seconds(p) if p.sent_bytes else None,
        needed_rate=needed_bandwidth(
            replace(case, link=replace(speed, bits_per_second=1e3)), UTILISATION
        ),
        target=UTILISATION,
        link_rate=speed.bits_per_second,
        loss_gap=loss_gap(p.num_params, basis.num_islands),
        is_extrapolated=is_extrapolated(p.num_params),
        assumed=assumed,
    )


def build_case(basis: Basis, speed: "LinkSpeed") -> "Case":
    """Return the run in the form that `diloco plan` predicts. Raises ConfigError or InputError."""
    from diloco.planning.mesh.step_plan import vocabulary
    from diloco.planning.predict import Case
    from inner.measure.param_specs import averaged_specs
    from inner.model.sizes import resolve_sizes
    from outer.cost import measure_host_speed

    run = basis.config.run
    return Case(
        outer=run.outer,
        specs=averaged_specs(resolve_sizes(run.model, vocabulary(run)[0])),
        num_islands=basis.num_islands,
        step_seconds=basis.step_seconds[basis.fastest],
        link=speed,
        speed=measure_host_speed(run.outer),
        ranks=basis.ranks,
        spread=basis.spread,
    )


def reduce_seconds(p: "Prediction") -> float:
    """Return the duration of a cycle's reduces, hidden or not, including the outer steps in
    them.
    """
    return p.transfer_seconds + p.trip_seconds + p.codec_seconds + p.step_seconds + p.hidden_seconds
