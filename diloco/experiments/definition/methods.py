"""Name the method that a config uses, and turn a config of islands into data-parallel training.
Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from diloco.config.schema import Config
from inner.import_path import is_import_path
from outer.config import OuterConfig, OuterOptimizerConfig

INNER_NAMES = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
PLAIN_AVERAGING = OuterOptimizerConfig(lr=1.0, momentum=0.0, nesterov=False)
"""The outer step with which a single island, whose pseudo-gradient is the mean, keeps its own
params."""


def name_method(config: Config, *, is_data_parallel: bool) -> str:
    """Return the method in words: outer optimizer, inner steps, islands, codec, and all else that
    is not the default.
    """
    optimizer = config.optimizer
    outer = config.outer
    islands = len(config.islands)
    inner = INNER_NAMES.get(optimizer.name, optimizer.name)
    if optimizer.muon_row_beta is not None:
        inner = f"NorMuon {optimizer.muon_row_beta:g}"
    if optimizer.momentum_weight < 1:
        inner = f"QHAdamW {optimizer.momentum_weight:g}/{optimizer.betas[0]:g}"
    if optimizer.averaging is not None:
        inner += f" averaged (x {optimizer.averaging.x:g}, y {optimizer.averaging.y:g})"
    if is_data_parallel:
        return f"data-parallel {inner}"
    words = [name_outer_step(outer), f"{inner} inside" if inner != "AdamW" else ""]
    words += [f"H {outer.inner_steps}", f"{islands} island{'s' * (islands > 1)}"]
    words += name_schedule(outer)
    if islands > 1:
        words += [name_codec(outer)]
    return ", ".join(filter(None, words))


def name_outer_step(outer: OuterConfig) -> str:
    """Return the name of the outer optimizer: `Nesterov 0.7/0.9` has learning rate 0.7 and momentum
    0.9.
    """
    if outer.gossip is not None:
        gossip = outer.gossip
        return f"gossip of {gossip.group} {gossip.lr:g}/{gossip.momentum:g}, pull {gossip.pull:g}"
    step = outer.optimizer
    if step.rule is not None:
        return f"{name_own(step.rule, step.options)} {step.lr:g}"
    if step.momentum == 0:
        return "plain averaging" if step.lr == 1 else f"averaging {step.lr:g}"
    kind = "delayed Nesterov" if step.delayed else "Nesterov" if step.nesterov else "momentum"
    return f"{kind} {step.lr:g}/{step.momentum:g}" + (" aligned" if step.align is not None else "")


def name_schedule(outer: OuterConfig) -> list[str]:
    """Return words for fragments, timing and merge, as far as they are not the default."""
    words = [f"{outer.fragments} fragments"] if outer.fragments > 1 else []
    words += [f"tau {outer.delay}"] if outer.delay else []
    words += [f"mix {outer.mix:g}"] if outer.mix else []
    words += ["eager"] if outer.eager else []
    words += ["moments {}/{}".format(*outer.moments)] if outer.moments else []
    words += name_experts(outer)
    merge = outer.merge
    rule = (
        name_own(merge.rule, merge.options)
        if is_import_path(merge.rule)
        else merge.rule.replace("_", " ")
    )
    words += [rule] if rule != "mean" else []
    words += (
        [f"norm z-score {merge.max_norm_zscore:g}"] if merge.max_norm_zscore is not None else []
    )
    words += [f"norm ratio {merge.max_norm_ratio:g}"] if merge.max_norm_ratio is not None else []
    return words + ([f"cosine {merge.min_cosine:g}"] if merge.min_cosine is not None else [])


def name_experts(outer: OuterConfig) -> list[str]:
    """Return words for the experts of a mixture, as far as they are treated otherwise than the
    rest.
    """
    words = ["experts by routed tokens"] if outer.merge.experts == "routed" else []
    words += [f"experts every {outer.experts.every} rounds"] if outer.experts.every > 1 else []
    return words + (
        [f"experts in {outer.experts.codec}"] if outer.experts.codec is not None else []
    )


def name_codec(outer: OuterConfig) -> str:
    """Return the codec with its settings, for example `stat2 feedback 0.9`."""
    coding = outer.coding
    name = outer.codec
    if is_import_path(name):
        name = name_own(name, coding.options)
    if name == "topk":
        name += f" {coding.top_k} of {coding.chunk_elements} in {coding.value_bits} bits"
    if name == "lowrank":
        name += f" {coding.rank}"
    if coding.rounding == "stochastic":
        name += " stochastic"
    return name if coding.feedback is None else f"{name} feedback {coding.feedback:g}"


def name_own(path: str, options: Mapping[str, Any]) -> str:
    """Return the class or function name of own code, with its options."""
    given = ", ".join(f"{name} {value}" for name, value in options.items())
    name = path.partition(":")[2]
    return f"{name} ({given})" if given else name


def as_data_parallel(config: Config, total_steps: int, evaluations: int) -> Config:
    """Return a config with one island whose step has the tokens of all islands.

    Its rounds do not change the params. They only set when the run is evaluated. The config depends
    on the model, the text, the inner optimizer and the number of steps, and not on the outer loop.
    """
    optimizer = config.optimizer
    whole = optimizer.tokens_per_step * len(config.islands)
    inner_steps = largest_divisor(total_steps, max(total_steps // evaluations, 1))
    outer = OuterConfig(
        rounds=total_steps // inner_steps,
        inner_steps=inner_steps,
        optimizer=PLAIN_AVERAGING,
        transport=config.outer.transport,
        wait_seconds=config.outer.wait_seconds,
    )
    return config.model_copy(
        update={
            "optimizer": optimizer.model_copy(update={"tokens_per_step": whole}),
            "outer": outer,
            "evaluate": config.evaluate.model_copy(update={"every_rounds": 1}),
            "islands": ({},),
        }
    )


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)
