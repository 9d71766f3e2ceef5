"""The scaling laws of DiLoCo (2503.09799): batch, inner learning rate and loss for a model's size and islands.

Fits of AdamW on C4 at 20 tokens per parameter, with 30 inner steps and an outer Nesterov momentum of 0.9. N counts
parameters, losses are nats per token.
"""

DATA_PARALLEL_LOSS = (18.129, -0.0953)
ISLANDS_LOSS = {1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""L = a N^b for each number of islands M that was fitted alone."""
JOINT_LOSS = (19.226, -0.0985, 0.0116)
"""L = a N^b M^c over all M."""
DATA_PARALLEL_LR = (16319.0, -0.819)
JOINT_LR = (22256.0, -0.8827, 0.2929)
DATA_PARALLEL_BATCH = (462.68, 0.281)
JOINT_BATCH = (14.521, 0.4695, 0.3399)
"""Tokens of one step of all islands together."""
FITTED_PARAMS = (35e6, 2.4e9)
"""Sizes of the smallest and largest models that the fits are from."""
CHECKED = {"4B": (2.224, 2.230), "10B": (2.090, 2.096)}
"""Losses of the paper's largest models, trained to check the fits: data-parallel, and four islands."""


def diloco_loss(params: float, islands: int) -> float:
    """Loss of DiLoCo at 20 tokens per parameter: the fit for so many islands, or else the joint one."""
    if islands in ISLANDS_LOSS:
        return _power(ISLANDS_LOSS[islands], params)
    return _power(JOINT_LOSS, params, islands)


def loss_gap(params: float, islands: int) -> float:
    """Loss of DiLoCo relative to data-parallel training by the fits: 0.01 is 1 % worse."""
    return diloco_loss(params, islands) / _power(DATA_PARALLEL_LOSS, params) - 1


def best_lr(params: float, islands: int | None) -> float:
    """Best peak learning rate of the inner AdamW; None islands: of data-parallel training."""
    return _power(DATA_PARALLEL_LR, params) if islands is None else _power(JOINT_LR, params, islands)


def best_batch(params: float, islands: int | None) -> float:
    """Best number of tokens of a step of all islands together; None islands: of data-parallel training."""
    return _power(DATA_PARALLEL_BATCH, params) if islands is None else _power(JOINT_BATCH, params, islands)


def is_extrapolated(params: float) -> bool:
    """Whether the model is smaller or larger than those that the fits of 2503.09799 are from."""
    return not FITTED_PARAMS[0] <= params <= FITTED_PARAMS[1]


def _power(law: tuple[float, ...], params: float, islands: int = 1) -> float:
    """a N^b, or a N^b M^c."""
    a, b, *c = law
    return a * params**b * islands ** (c[0] if c else 0.0)
