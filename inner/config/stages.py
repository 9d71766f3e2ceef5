"""Config of a run's stages. From some round on, a stage changes mixture, sequence length, batch or
learning rate.
"""

from collections.abc import Sequence

from pydantic import Field

from inner.config.data import DataConfig
from inner.config.optimizer import OptimizerConfig
from inner.config.section import Section
from inner.errors import nearest_multiples


class StageConfig(Section):
    """One stage. Values that it does not set come from the other sections of the run's config."""

    tokens: int | None = Field(default=None, ge=1)
    """Number of tokens that the islands at the start of the run read together in this stage,
    rounded up to whole cycles. null: until outer.rounds is reached; required for the last stage,
    and not allowed for others."""
    seq_len: int | None = Field(default=None, ge=8)
    """Replaces data.seq_len. It must divide the longest seq_len of all stages."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Replaces optimizer.tokens_per_step."""
    lr: float | None = Field(default=None, gt=0)
    """Replaces optimizer.lr. Warm-up and schedule continue to follow the inner step of the run."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Replaces weights of data.mixture, by the names of its sources. 0 leaves a source out of the
    stage."""

    def apply(
        self, data: DataConfig, optimizer: OptimizerConfig
    ) -> tuple[DataConfig, OptimizerConfig]:
        """Return the run's data and optimizer sections with this stage's values in them."""
        mixture = tuple(
            entry.model_copy(update={"weight": self.weights.get(entry.name, entry.weight)})
            for entry in data.mixture
        )
        data = data.model_copy(update={"mixture": mixture, "seq_len": self.seq_len or data.seq_len})
        changes = {
            name: value
            for name in ("lr", "tokens_per_step")
            if (value := getattr(self, name)) is not None
        }
        return data, optimizer.model_copy(update=changes)


def count_stage_cycles(stages: Sequence[StageConfig], cycle_tokens: Sequence[int]) -> list[int]:
    """Return the number of cycles of each stage except the last. `cycle_tokens`: the tokens of one
    cycle of each stage.
    """
    return [
        -(-(stage.tokens or 0) // tokens)
        for stage, tokens in zip(stages[:-1], cycle_tokens, strict=False)
    ]


def check_stages(
    stages: Sequence[StageConfig], data: DataConfig, optimizer: OptimizerConfig
) -> None:
    """Raise ValueError if the stages do not fit each other or the text."""
    names = {entry.name for entry in data.mixture}
    for number, stage in enumerate(stages):
        where = f"stages[{number}]"
        is_last = number == len(stages) - 1
        if (stage.tokens is None) != is_last:
            what = (
                "tokens is set in the last stage, which"
                if is_last
                else "tokens is not set in a stage that"
            )
            cure = (
                "takes the rest of outer.rounds; leave it out"
                if is_last
                else "another stage follows; set it"
            )
            raise ValueError(f"{where}.{what} {cure}")
        if unknown := sorted(stage.weights.keys() - names):
            known = ", ".join(sorted(names)) or "no data.mixture"
            raise ValueError(f"{where}.weights: got {', '.join(unknown)}; the run has {known}")
        staged, stepped = stage.apply(data, optimizer)
        if any(weight < 0 for weight in stage.weights.values()):
            raise ValueError(f"{where}.weights: got {stage.weights}; a weight is 0 or more")
        if staged.mixture and not any(entry.weight for entry in staged.mixture):
            raise ValueError(
                f"{where}.weights leave no source to read; give at least one source a weight above "
                "0"
            )
        if stepped.tokens_per_step % staged.seq_len:
            raise ValueError(
                f"{where}: a step of {stepped.tokens_per_step} tokens is not a whole number of "
                f"sequences of {staged.seq_len}; set tokens_per_step to a multiple of seq_len"
            )
    _check_lengths([stage.seq_len or data.seq_len for stage in stages], data)


def _check_lengths(lengths: Sequence[int], data: DataConfig) -> None:
    longest = max(lengths, default=0)
    for number, length in enumerate(lengths):
        if longest % length:
            raise ValueError(
                f"stages[{number}].seq_len: got {length}, which does not divide the longest of the "
                f"stages, {longest}"
            )
    if longest and data.order == "shards" and data.shard_tokens % longest:
        raise ValueError(
            f"data.shard_tokens: got {data.shard_tokens}, which is not a multiple of {longest}, "
            "the longest seq_len of the stages; allowed: multiples of it, such as "
            f"{nearest_multiples(data.shard_tokens, longest)}"
        )
    if {*lengths} - {data.seq_len} and any(source.format == "chat" for source in data.sources):
        raise ValueError(
            "stages: conversations are packed for one sequence length only; leave seq_len out"
        )
