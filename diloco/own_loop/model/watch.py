"""Check that a model still has the parameters that it had when its island entered the run."""

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from diloco.errors import ConfigError
from diloco.own_loop.model.names import clean_name
from diloco.own_loop.model.params import Model, parts_of
from outer.space.ranks import RankGroup

NAMED = 4
"""Most changed parameters that an error names; it gives only the number of the others."""


class ParamsWatch:
    """Compares a model's present parameters with its earlier ones, because islands would not notice
    new parameters.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._trained = {
            name: param for name, param in params_of(model).items() if param.requires_grad
        }
        self._kinds = {name: kind(param) for name, param in self._trained.items()}

    def require_same(self, ranks: RankGroup, number: int) -> None:
        """Raise ConfigError on every rank if a rank's parameters have been replaced. `number`: the
        round.

        Every rank must call it.
        """
        for rank, changes in enumerate(ranks.gather(self.changes())):
            if changes:
                more = f"; and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
                where = f" on rank {rank}" if ranks.num_ranks > 1 else ""
                raise ConfigError(
                    f"round {number}: the model's parameters have changed since Islands was "
                    f"made{where}: {'; '.join(changes[:NAMED])}{more}. Islands averages the "
                    "parameters that required gradients then, and this island would drift apart. "
                    "Make Islands after the change, the same on every island: what is trained "
                    "later requires gradients from the start and joins the optimizer later, and "
                    "new values are copied into a parameter (copy_, load_state_dict without "
                    "assign=True)"
                )

    def changes(self) -> list[str]:
        """Return one phrase for each parameter that differs. A parameter that was frozen since is
        still averaged, so it is no change.
        """
        now = params_of(self._model)
        changes = []
        for name, param in now.items():
            if name not in self._trained:
                if param.requires_grad:
                    changes.append(f"{name!r} requires a gradient, and did not or was not there")
            elif param is not self._trained[name]:
                changes.append(f"{name!r} is another tensor")
            elif kind(param) != self._kinds[name]:
                changes.append(f"{name!r} was {self._kinds[name]} and is {kind(param)}")
        changes += [f"{name!r} is no longer there" for name in self._trained if name not in now]
        return changes


def params_of(model: Model) -> dict[str, Tensor]:
    """Return all parameters of this rank's parts by name. With FSDP2 they are the shards."""
    params: dict[str, Tensor] = {}
    for number, part in enumerate(parts_of(model)):
        for module in part.modules():
            if isinstance(module, FSDPModule):
                # After an evaluation the module may still hold gathered parameters.
                module.reshard()
        for full_name, param in part.named_parameters():
            name = clean_name(full_name)
            # Two parts may have copies of one parameter.
            params[name if name not in params else f"{name} of part {number}"] = param
    return params


def kind(param: Tensor) -> str:
    """Return dtype and shape in words. Both may change while the tensor object stays the same."""
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{dtype} {list(param.shape)}"
