"""What one island trains and how. No torch here: a config error must come before torch is imported."""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A part of the config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """A Llama-style decoder. `preset` gives the sizes; any size named beside it wins over the preset's."""

    init_from: str | None = None
    """A folder in Hugging Face's layout: training begins with its weights, and its config.json gives the sizes."""
    init_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Of its *.safetensors, one after the other by name; None: filled in as the run begins."""
    preset: str | None = None
    dim: int | None = Field(default=None, ge=8)
    num_layers: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    ffn_dim: int | None = Field(default=None, ge=8)
    vocab_size: int | None = Field(default=None, ge=2)
    """None: the tokenizer's size."""
    rope_theta: float | None = Field(default=None, gt=0)
    """None: the preset's, or 10000."""
    norm_eps: float = Field(default=1e-5, gt=0)
    qk_norm: bool = False
    tie_embeddings: bool | None = None


class SourceConfig(Section):
    """Where text comes from."""

    source: Literal["python-stdlib", "files", "huggingface"] = "python-stdlib"
    paths: list[str] = []
    """For `files`: text, .jsonl or .parquet files, folders or glob patterns."""
    dataset: str | None = None
    """For `huggingface`: the dataset's name, for example `allenai/c4`."""
    dataset_config: str | None = None
    split: str = "train"
    text_field: str = "text"
    max_tokens: int | None = Field(default=None, ge=1)
    """Stop reading the training text after so many tokens."""


class MixtureEntry(SourceConfig):
    """One of several sources."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """What metrics call it."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Its share of the sequences that are read, times the sum of all weights."""


class DataConfig(SourceConfig):
    """Where text comes from and how it is cut into sequences."""

    mixture: tuple[MixtureEntry, ...] = ()
    """Several sources, mixed by weight; empty: the one named beside it."""
    tokenizer: str = "bytes"
    """`bytes`, the path of a tokenizer.json, or a tokenizer's name on the Hugging Face hub."""
    seq_len: int = Field(default=256, ge=8)
    document_mask: bool = False
    """Whether attention stays within a document when several are packed into a sequence."""
    heldout_fraction: float = Field(default=0.02, gt=0, lt=1)

    @model_validator(mode="after")
    def _a_mixture_names_each_source_once(self) -> "DataConfig":
        names = [entry.name for entry in self.mixture]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"mixture has {twice[0]!r} {names.count(twice[0])} times; give each entry its own name")
        fields = SourceConfig.model_fields
        also = [key for key, field in fields.items() if getattr(self, key) != field.get_default()]
        if self.mixture and also:
            raise ValueError(f"mixture has sources of its own: move {', '.join(also)} into its entries")
        return self

    @property
    def sources(self) -> "tuple[DataConfig, ...]":
        """One for each source, in the mixture's order; without a mixture this config itself."""
        fields = SourceConfig.model_fields
        changes = [{key: getattr(entry, key) for key in fields} | {"mixture": ()} for entry in self.mixture]
        return tuple(self.model_copy(update=change) for change in changes) or (self,)


class ParamGroup(Section):
    """Parameters that are stepped in their own way."""

    pattern: str
    """A regular expression, searched for in the parameter's full name (`layers.0.attention.q_proj.weight`); where
    several groups match, the first counts. `^` and `$` tie it to the ends of the name."""
    lr_scale: float = Field(default=1.0, ge=0)
    """Times the learning rate; 0 freezes."""
    weight_decay: float | None = Field(default=None, ge=0)
    """None: as without the group."""
    optimizer: Literal["adamw"] | None = None
    """With `muon`: adamw for matrices that would be Muon's."""

    @field_validator("pattern")
    @classmethod
    def _pattern_is_valid(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"a regular expression ({error}); write \\. for a dot") from None
        return pattern


class AveragingConfig(Section):
    """Generalized primal averaging (2512.17131) of the inner optimizer: one island's DiLoCo, made smooth.

    The inner optimizer steps a point of its own; x is the slow average of that point. Trained on, evaluated, and sent
    to other islands is what lies between the two: y, the island's params.
    """

    x: float = Field(ge=0, lt=1)
    """What x keeps of itself in a step; 0.9 ** (1 / inner_steps) is like DiLoCo with so many; 0: no averaging."""
    y: float = Field(default=0.7, gt=0, le=1)
    """The share of x in y; the rest is the inner optimizer's own point."""


class OptimizerConfig(Section):
    """The inner optimizer, its schedule in inner steps, and what guards it."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """`muon`: Muon for the blocks' matrices, AdamW with the same lr for the rest."""
    lr: float = Field(default=4e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices; norms and the embedding do not decay, unless a group says so."""
    groups: tuple[ParamGroup, ...] = ()
    averaging: AveragingConfig | None = None
    """None: the inner optimizer steps the params themselves."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=100, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    """For `wsd`: the steps of the final linear decay."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    tokens_per_step: int = Field(default=16384, ge=1)
    """Tokens of one inner step in one island, over all of its ranks and micro-batches."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Non-finite steps in a row that are skipped before the island stops."""

    @model_validator(mode="after")
    def _only_muon_has_exceptions(self) -> "OptimizerConfig":
        chosen = [group.pattern for group in self.groups if group.optimizer is not None]
        if chosen and self.name != "muon":
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
    """Degrees of the island's mesh. Their product must be its number of ranks; dp_shard -1 takes the rest."""

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


class ParallelConfig(Section):
    """How an island uses the axes of its mesh. None of it changes what is computed, but for rounding."""

    zero: Literal[2, 3] | None = None
    """FSDP: 3 frees a block's weights after its forward, 2 keeps them; None: 3, and 2 under pipeline parallel."""
    sequence_parallel: bool = True
    """Tensor parallel: norms and the residual stream are split along the sequence, too."""
    loss_chunk: int = Field(default=4096, ge=1)
    """Tokens whose logits are held at a time."""
    schedule: Schedule = "1f1b"
    stages_per_rank: int | None = Field(default=None, ge=1)
    """Virtual pipeline stages of a rank; None: 1 for gpipe and 1f1b, else 2."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage, first to last; None: even, the embedding and the head counted as a layer each."""
    context: ContextMethod = "ring"
    """How attention sees the rest of the sequence when cp > 1."""
    recompute: Recompute = "none"
    """What a block's backward computes again instead of keeping it."""
    compile: bool = False
    """torch.compile for each block."""

    def frees_after_forward(self, pp: int) -> bool:
        """Whether blocks free their weights after the forward; a pipeline would gather them for each micro-batch."""
        return (self.zero or (3 if pp == 1 else 2)) == 3

    def splits_stream(self, tp: int) -> bool:
        """Whether a rank of tp holds but its share of the positions of the residual stream."""
        return tp > 1 and self.sequence_parallel


class ProfileConfig(Section):
    """Which inner steps every rank writes a profile of."""

    steps: tuple[int, int] | None = None
    """First and last, counted from 1; None: no profile."""
    memory: bool = False
    """Also which operation allocated what and when."""

    @model_validator(mode="after")
    def _steps_are_a_range(self) -> "ProfileConfig":
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps {list(self.steps)} must be [first, last] with 1 <= first <= last")
        return self
