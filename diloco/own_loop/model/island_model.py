"""What islands need of the user's model: the tensors that they average, and checks of them."""

from collections.abc import Callable
from typing import NamedTuple

from diloco.errors import ConfigError
from diloco.own_loop.model.copies import check_held
from diloco.own_loop.model.masters import CopiedBack, KeptMasters, Masters
from diloco.own_loop.model.optimizers import Optimizers, as_list, learning_rate, with_moments
from diloco.own_loop.model.params import (
    Model,
    RankParams,
    describe,
    hold_params,
    list_names,
    parts_of,
)
from diloco.own_loop.model.watch import ParamsWatch
from inner.model.buffers import ParamsView
from inner.optim.moments import ParamsAndMoments
from inner.params import LocalParams
from outer.space.ranks import RankGroup


class ModelRules(NamedTuple):
    """What the config and a saved state say about the model."""

    averages_moments: bool = False
    keeps_masters: bool = False
    """Whether Islands keeps masters of parameters of a half-precision dtype."""
    was_saved: Callable[[str], bool] | None = None
    """Whether the saved state is of a model with this description. None: there is no saved
    state.
    """


class IslandModel:
    """This rank's parts of the model, with the parameters of the whole island."""

    params: ParamsView
    """The parameters, with their moments if the run averages them, for the outer loop."""
    moments: ParamsAndMoments | None
    description: str
    """Differs between models that cannot be averaged with each other."""
    names: tuple[str, ...]
    """RunConfig.param_names."""

    def __init__(
        self,
        ranks: RankGroup,
        model: Model,
        optimizers: Optimizers,
        masters: Masters | None,
        rules: ModelRules,
    ) -> None:
        """Check the model. Every rank must call it. Raises ConfigError on every rank if islands
        cannot average the model.
        """
        if masters is not None and rules.keeps_masters:
            raise ConfigError(
                "params: masters are given, and island.masters is true; leave one of them out"
            )
        params, found = hold_as_saved(ranks, model, masters, rules)
        check_held(ranks, params)
        if rules.averages_moments and rules.keeps_masters:
            raise ConfigError(
                "outer.moments: with island.masters the optimizer's moments are not fp32; step "
                "fp32 masters of your own and give them as params=diloco.Masters(...)"
            )
        self.moments = with_moments(params, optimizers, ranks) if rules.averages_moments else None
        self.params = self.moments or params
        if masters is not None:
            self.params = CopiedBack(self.moments or params, masters.copy)
        elif found.kept:
            self.params = keep_masters(params, found)
        self.description = describe((self.moments or params).specs)
        self.names = list_names(params.specs)
        self.device = str(
            next(param.device for part in parts_of(model) for param in part.parameters())
        )
        self._ranks = ranks
        self._watch = ParamsWatch(model)
        self._optimizers = as_list(optimizers)

    @property
    def lr(self) -> float:
        """The learning rate of the first group, 0 without an optimizer."""
        return learning_rate(self._optimizers)

    def require_same(self, round_number: int) -> None:
        """Raise ConfigError on every rank if parameters have been replaced. Every rank must call
        it.
        """
        self._watch.require_same(self._ranks, round_number)


def hold_as_saved(
    ranks: RankGroup, model: Model, masters: Masters | None, rules: ModelRules
) -> tuple[LocalParams, RankParams]:
    """Return the parameters, with names and order as in the saved state. Every rank must call it.

    A run that was saved by an earlier version goes on with its names, on which its identity
    depends.
    """
    held = hold_params(ranks, model, masters, keeps_masters=rules.keeps_masters)
    was_saved = rules.was_saved
    if not all(ranks.gather(was_saved is not None and not was_saved(describe(held[0].specs)))):
        return held
    assert was_saved is not None
    before = hold_params(ranks, model, masters, keeps_masters=rules.keeps_masters, as_before=True)
    return before if all(ranks.gather(was_saved(describe(before[0].specs)))) else held


def keep_masters(params: LocalParams, found: RankParams) -> KeptMasters:
    """Return the parameters with the masters that Islands keeps."""
    model_of = {id(master): model for master, model in found.kept}
    copies = [params.copies(index) for index in range(len(params.slices))]
    return KeptMasters(
        params, [[model_of[id(each)] for each in some if id(each) in model_of] for some in copies]
    )
