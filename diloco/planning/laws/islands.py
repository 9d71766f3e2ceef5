"""The scaling laws of DiLoCo (2503.09799): batch, inner learning rate and loss for a model's size
and islands.

The laws are fits of AdamW on C4 at 20 tokens per parameter, with 30 inner steps and an outer
Nesterov momentum of 0.9. N counts parameters, losses are in nats per token.
"""

DATA_PARALLEL_LOSS = (18.129, -0.0953)
ISLANDS_LOSS = {
    1: (18.363, -0.0961),
    2: (18.768, -0.0969),
    4: (19.762, -0.0992),
    8: (21.051, -0.1018),
}
"""(a, b) of L = a N^b, by the number of islands M. Each M has a fit of its own."""
JOINT_LOSS = (19.226, -0.0985, 0.0116)
"""(a, b, c) of the joint fit L = a N^b M^c over all M."""
DATA_PARALLEL_LR = (16319.0, -0.819)
JOINT_LR = (22256.0, -0.8827, 0.2929)
DATA_PARALLEL_BATCH = (462.68, 0.281)
JOINT_BATCH = (14.521, 0.4695, 0.3399)
"""Coefficients for the tokens of one step of all islands together."""
FITTED_PARAMS = (35e6, 2.4e9)
"""Sizes in parameters of the smallest and the largest model to which the laws were fitted."""
CHECKED = {"4B": (2.224, 2.230), "10B": (2.090, 2.096)}
"""Losses of the paper's largest models, trained to check the fits: data-parallel, and with four
islands."""


def diloco_loss(params: float, islands: int) -> float:
    """Return DiLoCo's loss at 20 tokens per parameter, by the fit for `islands` islands or else by
    the joint fit.
    """
    if islands in ISLANDS_LOSS:
        return _power(ISLANDS_LOSS[islands], params)
    return _power(JOINT_LOSS, params, islands)


def loss_gap(params: float, islands: int) -> float:
    """Return the difference of DiLoCo's loss from that of data-parallel training by the fits: 0.01
    is 1 % worse.
    """
    return diloco_loss(params, islands) / _power(DATA_PARALLEL_LOSS, params) - 1


def best_lr(params: float, islands: int | None) -> float:
    """Return the best peak learning rate of the inner AdamW; for data-parallel training if
    `islands` is None.
    """
    return (
        _power(DATA_PARALLEL_LR, params) if islands is None else _power(JOINT_LR, params, islands)
    )


def best_batch(params: float, islands: int | None) -> float:
    """Return the best tokens per step of all islands together; for data-parallel training if
    `islands` is None.
    """
    return (
        _power(DATA_PARALLEL_BATCH, params)
        if islands is None
        else _power(JOINT_BATCH, params, islands)
    )


def is_extrapolated(params: float) -> bool:
    """Return whether the model is smaller or larger than all models to which 2503.09799 fits its
    laws.
    """
    return not FITTED_PARAMS[0] <= params <= FITTED_PARAMS[1]


def _power(law: tuple[float, ...], params: float, islands: int = 1) -> float:
    """Return a N^b, or a N^b M^c if the law has three coefficients."""
    a, b, *c = law
    return a * params**b * islands ** (c[0] if c else 0.0)
