"""Config of one island: model, data, optimizer and parallelism. No torch, so that config errors appear fast."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inner.import_path import Options, is_import_path, one_of


class Section(BaseModel):
    """Base of the config's sections: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": (("original_max_position_embeddings",), ()),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("original_max_position_embeddings",), ("attention_factor", "beta_fast", "beta_slow")),
}
"""Keys beside `rope_type` and `factor` that each type of RoPE scaling needs, and those that it also knows."""


class RopeScaling(Section):
    """How RoPE is scaled for sequences longer than in pre-training, in transformers' words. See inner/model/rope.py."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float = Field(ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Length of the sequences in pre-training."""
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    """None: 0.1 ln(factor) + 1."""
    beta_fast: float | None = Field(default=None, gt=0)
    """None: 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """None: 1."""

    @property
    def original_length(self) -> int:
        assert self.original_max_position_embeddings is not None, f"{self.rope_type} has no original length"
        return self.original_max_position_embeddings

    @model_validator(mode="after")
    def _keys_fit_the_type(self) -> "RopeScaling":
        needed, optional = ROPE_KEYS[self.rope_type]
        given = {name for name in self.model_dump(exclude_none=True) if name not in ("rope_type", "factor")}
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}")
        if unknown := sorted(given - {*needed, *optional}):
            raise ValueError(f"rope_type {self.rope_type} does not use {', '.join(unknown)}; leave it out")
        if self.rope_type == "llama3" and (self.low_freq_factor or 0) >= (self.high_freq_factor or 0):
            raise ValueError("low_freq_factor must be less than high_freq_factor")
        return self


class ModelConfig(Section):
    """A Llama-style decoder. `preset` gives the sizes, and every size that is also set replaces the preset's."""

    init_from: str | None = None
    """Folder in Hugging Face's layout. Its weights are the initial weights, and its config.json gives the sizes."""
    init_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of its *.safetensors, concatenated in the order of their names. None: filled in when the run starts."""
    preset: str | None = None
    dim: int | None = Field(default=None, ge=8)
    num_layers: int | None = Field(default=None, ge=1, le=10000)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    """Size of a head. None: dim / num_heads."""
    ffn_dim: int | None = Field(default=None, ge=8)
    vocab_size: int | None = Field(default=None, ge=2)
    """None: the size of the tokenizer's vocabulary."""
    rope_theta: float | None = Field(default=None, gt=0)
    """None: the preset's value, or 10000 without a preset."""
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(default=1e-5, gt=0)
    qk_norm: bool = False
    """RMSNorm of each query and key head, as in Qwen3."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections, as in Qwen2.5."""
    tie_embeddings: bool | None = None


class SourceConfig(Section):
    """One source of text."""

    source: Literal["python-stdlib", "files", "huggingface"] = "python-stdlib"
    paths: list[str] = []
    """For `files`: text, .jsonl or .parquet files, folders, or glob patterns."""
    dataset: str | None = None
    """For `huggingface`: the name of the dataset, for example `allenai/c4`."""
    dataset_config: str | None = None
    split: str = "train"
    text_field: str = "text"
    max_tokens: int | None = Field(default=None, ge=1)
    """Number of training tokens to read at most. None: all of the text."""


class MixtureEntry(SourceConfig):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the source in the metrics."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Relative share of the sequences that are read; the weights need not sum to 1."""


class DataConfig(SourceConfig):
    """The sources of text, and how the text is cut into sequences."""

    mixture: tuple[MixtureEntry, ...] = ()
    """Several sources, mixed by weight. Empty: the single source given by `source` and the keys next to it."""
    tokenizer: str = "bytes"
    """`bytes`, the path of a tokenizer.json, or the name of a tokenizer on the Hugging Face hub."""
    seq_len: int = Field(default=256, ge=8)
    document_mask: bool = False
    """Whether attention stays within its document when a sequence holds several documents."""
    heldout_fraction: float = Field(default=0.02, gt=0, lt=1)

    @model_validator(mode="after")
    def _a_mixture_names_each_source_once(self) -> "DataConfig":
        names = [entry.name for entry in self.mixture]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"mixture has {twice[0]!r} {names.count(twice[0])} times; give each entry its own name")
        also = [key for key, field in SourceConfig.model_fields.items() if getattr(self, key) != field.get_default()]
        if self.mixture and also:
            raise ValueError(f"mixture has sources of its own: move {', '.join(also)} into its entries")
        return self

    @property
    def sources(self) -> "tuple[DataConfig, ...]":
        """One config per source, in the order of the mixture. Without a mixture, this config alone."""
        fields = SourceConfig.model_fields
        changes = [{key: getattr(entry, key) for key in fields} | {"mixture": ()} for entry in self.mixture]
        return tuple(self.model_copy(update=change) for change in changes) or (self,)


class ParamGroup(Section):
    """Optimizer settings for the parameters whose names match a pattern."""

    pattern: str
    """Regular expression, searched for in the parameter's full name (`layers.0.attention.q_proj.weight`). If several
    groups match, the first is used. `^` and `$` anchor the pattern to the ends of the name."""
    lr_scale: float = Field(default=1.0, ge=0)
    """Factor on the learning rate; 0 freezes the parameters."""
    weight_decay: float | None = Field(default=None, ge=0)
    """None: the value that the parameters would have without this group."""
    optimizer: Literal["adamw"] | None = None
    """`adamw` beside Muon or an own optimizer: step these parameters with AdamW instead."""

    @field_validator("pattern")
    @classmethod
    def _pattern_is_valid(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"a regular expression ({error}); write \\. for a dot") from None
        return pattern


class AveragingConfig(Section):
    """Generalized primal averaging (2512.17131) of the inner optimizer: a smooth variant of single-island DiLoCo.

    The inner optimizer steps a point z of its own, and x is a slow average of z. The island's params are y, between
    the two: gradients are taken at y, and y is evaluated and sent to other islands.
    """

    x: float = Field(ge=0, lt=1)
    """Decay of x per step. 0.9 ** (1 / inner_steps) resembles DiLoCo with that many inner steps; 0: no averaging."""
    y: float = Field(default=0.7, gt=0, le=1)
    """Share of x in y; the rest is z."""


class OptimizerConfig(Section):
    """The inner optimizer, its learning-rate schedule in inner steps, clipping, and the limit on skipped steps."""

    name: Annotated[str, one_of(("adamw", "sgd", "muon"), "my_package.optimizers:Lion")] = "adamw"
    """`muon`: Muon for the matrices of the blocks, AdamW with the same lr for all other parameters. An own optimizer is
    named by its import path: inner/optim/own_optimizer.py."""
    options: Options = {}
    """Arguments of an own optimizer."""
    lr: float = Field(default=4e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    """For matrices. Norms and the embedding do not decay unless a group sets it."""
    groups: tuple[ParamGroup, ...] = ()
    averaging: AveragingConfig | None = None
    """None: the inner optimizer steps the params directly."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=100, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    """For `wsd`: number of steps of the final linear decay."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    tokens_per_step: int = Field(default=16384, ge=1)
    """Tokens of one inner step of one island, over all of its ranks and micro-batches."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Number of consecutive non-finite steps that are skipped; one more stops the island."""

    @model_validator(mode="after")
    def _settings_fit_the_name(self) -> "OptimizerConfig":
        is_own = is_import_path(self.name)
        if self.options and not is_own:
            raise ValueError(f"options are those of an own optimizer, and name is {self.name}; leave options out")
        chosen = [group.pattern for group in self.groups if group.optimizer is not None]
        if chosen and self.name != "muon" and not is_own:
            raise ValueError(
                f"group {chosen[0]!r} chooses an optimizer, but name is {self.name}: all parameters have that one; "
                "leave the group's optimizer out, or set name to muon"
            )
        return self


class EvaluateConfig(Section):
    """Held-out loss on the global params."""

    every_rounds: int = Field(default=1, ge=1)
    tokens: int = Field(default=65536, ge=1)


class MeshConfig(Section):
    """Degrees of the island's mesh. Their product is the number of ranks; dp_shard -1 takes the remaining ranks."""

    pp: int = Field(default=1, ge=1)
    dp_replicate: int = Field(default=1, ge=1)
    dp_shard: int = Field(default=-1, ge=-1)
    cp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _shard_is_a_degree(self) -> "MeshConfig":
        if self.dp_shard == 0:
            raise ValueError("dp_shard must be a positive degree or -1 (all remaining ranks)")
        return self


Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "breadth_first", "interleaved_zero_bubble", "zbv", "dualpipev"]
ContextMethod = Literal["ring", "all_gather", "ulysses"]
Recompute = Literal["none", "attention", "selective", "full"]
Accumulate = Literal["sharded", "whole"]


class ParallelConfig(Section):
    """How an island uses the axes of its mesh. These settings change the results by rounding only."""

    zero: Literal[2, 3] | None = None
    """FSDP: 3 frees a block's gathered weights after its forward, 2 keeps them. None: 2 with a pipeline, else 3."""
    accumulate: Accumulate = "sharded"
    """How gradients of several micro-batches add up. `sharded`: each micro-batch reduces them over the shards. `whole`:
    every rank keeps whole gradients until the last one, which sends less and needs 4 bytes for each parameter."""
    sequence_parallel: bool = True
    """With tensor parallelism: also split norms and the residual stream along the sequence."""
    loss_chunk: int = Field(default=4096, ge=1)
    """Number of tokens whose logits are held at the same time."""
    schedule: Schedule = "1f1b"
    stages_per_rank: int | None = Field(default=None, ge=1)
    """Number of (virtual) pipeline stages per rank. None: 1 for gpipe and 1f1b, else 2."""
    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers of each stage, first to last. None: even, where embedding and head count as a layer each."""
    context: ContextMethod = "ring"
    """How attention reads the other ranks' share of the sequence when cp > 1."""
    recompute: Recompute = "none"
    """Activations that a block's backward recomputes instead of keeping them."""
    compile: bool = False
    """Whether each block is compiled with torch.compile."""

    def frees_after_forward(self, pp: int) -> bool:
        """Whether blocks free their gathered weights after the forward. Pipelines would gather them per micro-batch."""
        return (self.zero or (3 if pp == 1 else 2)) == 3

    def reduces_each_micro_batch(self, num_shards: int) -> bool:
        """Whether each micro-batch reduces its gradients over the shards. A single shard is whole anyway."""
        return self.accumulate == "sharded" and num_shards > 1

    def splits_stream(self, tp: int) -> bool:
        """Whether a tp rank holds only its share of the positions of the residual stream."""
        return tp > 1 and self.sequence_parallel


class ProfileConfig(Section):
    """The inner steps that every rank profiles."""

    steps: tuple[int, int] | None = None
    """First and last step, counted from 1. None: no profile."""
    memory: bool = False
    """Whether to also record memory allocations by operation and time."""

    @model_validator(mode="after")
    def _steps_are_a_range(self) -> "ProfileConfig":
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps {list(self.steps)} must be [first, last] with 1 <= first <= last")
        return self
