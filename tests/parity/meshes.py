"""Meshes to compare with one process, and what a rank sees of 20 AdamW steps on one."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inner.config import (
    BalanceConfig,
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    ParallelConfig,
    PredictConfig,
    RopeScaling,
    WindowConfig,
)
from inner.dry_run.comm_counter import CommCounter, island_groups
from inner.measure.traffic.rows import SCALARS, TrafficRow
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.init import initialise
from inner.model.sizes import ModelSizes, OwnModel
from inner.model.transformer import Transformer
from inner.param_spec import ParamSlice, ParamSpec
from inner.params import LocalParams
from inner.trainer import StepResult, Trainer
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    SEQ_LEN,
    SEQUENCES,
    batch,
    build_trainer,
    share,
    snapshot,
    whole_model,
)
from tests.parity.choices import ChoiceLog, Choices, join

ONE, PLAIN = Degrees(), ParallelConfig()
STEPS = 20
EOS = 7
COUNTED = 1
"""The step whose traffic is counted. The first one sets things up."""
BALANCE = BalanceConfig(bias_speed=0.01, sequence_loss=0.05, router_z_loss=0.01)
HELDOUT = 5
"""Windows; not a multiple of any number of data ranks here but one."""

# 61 tokens are no multiple of any degree; 2 key-value heads are fewer than tp 4.
GROUPED = ModelSizes(
    dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61, qk_norm=True
)
# One table read at both ends of the pipeline, one key-value head, layers that no number of stages
# divides.
TIED = replace(GROUPED, num_layers=7, num_kv_heads=1, tie_embeddings=True, qk_norm=False)
# Biases of queries, keys and values, heads wider than dim / heads, RoPE that depends on the length
# of the sequence.
QWEN = replace(
    GROUPED,
    own_head_dim=12,
    qk_norm=False,
    qkv_bias=True,
    rope_scaling=RopeScaling(rope_type="dynamic", factor=4.0, original_max_position_embeddings=8),
)
# No attention, learned positions, LayerNorm, biases, a parameter of three dims.
OWN = OwnModel(name="tests.own.models:GatedConv", options={"num_layers": 4}, vocab_size=61)
# Six experts, which are no multiple of four ranks; a dense block first, a shared expert, and
# groups.
MIXTURE = replace(
    GROUPED,
    experts=ExpertsConfig(
        number=6,
        per_token=2,
        dim=24,
        shared=1,
        dense_layers=1,
        scores="sigmoid",
        groups=3,
        kept_groups=2,
        scale=1.5,
    ),
)
# Latent attention, and softmax scores whose weights are not divided by their sum.
LATENT = replace(
    MIXTURE,
    num_kv_heads=4,
    qk_norm=False,
    latent=LatentConfig(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6),
    experts=ExpertsConfig(number=5, per_token=2, dim=16, renormalise=False),
)
# Multi-token prediction: two depths, then one of a mixture, then two with a tied table and latent
# attention.
PREDICT = replace(GROUPED, predict=PredictConfig(depths=2, weight=0.5))
PREDICT_MIXTURE = replace(MIXTURE, predict=PredictConfig(depths=1, weight=0.5))
PREDICT_TIED = replace(
    LATENT, experts=None, tie_embeddings=True, predict=PredictConfig(depths=2, weight=0.5)
)
# What distinguishes other families of decoders.
GEMMA = replace(
    TIED,
    num_layers=4,
    num_kv_heads=2,
    qk_norm=True,
    decoder=DecoderConfig(
        norm="rms_plus_one",
        norm_place="both",
        activation="gelu_tanh",
        window=WindowConfig(size=5, full_every=2, rope_theta=100.0),
        query_dim=10.0,
        score_cap=2.0,
        logit_cap=3.0,
        embed_scale=5.5,
    ),
)
# Without RoPE a bias of the keys changes nothing, and its gradient is rounding alone, so there is
# none.
GPT2 = replace(
    TIED,
    num_layers=4,
    num_kv_heads=4,
    decoder=DecoderConfig(
        norm="layer",
        activation="gelu_tanh",
        gated=False,
        out_bias=True,
        ffn_bias=True,
        positions="learned",
        max_positions=19,
    ),
)
NEOX = replace(
    GROUPED,
    qk_norm=False,
    qkv_bias=True,
    decoder=DecoderConfig(
        norm="layer",
        parallel="two_norms",
        activation="gelu",
        gated=False,
        out_bias=True,
        ffn_bias=True,
        rotary_dim=4,
    ),
)
COHERE = replace(
    TIED,
    num_layers=4,
    decoder=DecoderConfig(norm="layer_unbiased", parallel="one_norm", logit_scale=0.3),
)
ALIBI = replace(
    GROUPED,
    num_kv_heads=4,
    qk_norm=False,
    decoder=DecoderConfig(norm_place="after", activation="relu2", gated=False, positions="alibi"),
)
SMOLLM = replace(
    GROUPED, decoder=DecoderConfig(no_rope_every=2, window=WindowConfig(size=6, first_layer=1))
)
# Ulysses spreads key-value heads over ranks.
MANY_HEADS = replace(GROUPED, num_kv_heads=4)


@dataclass(frozen=True)
class Case:
    """An island to be compared with one process that trains the same sizes."""

    degrees: Degrees = ONE
    sizes: ModelSizes | OwnModel = GROUPED
    parallel: ParallelConfig = PLAIN
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the trainer, both on the mesh and on one process."""
    replays: bool = False
    """Whether routers are forced to choose what they choose on one process."""

    @property
    def reference(self) -> "Case":
        return Case(sizes=self.sizes, settings=self.settings)

    @property
    def has_experts(self) -> bool:
        return isinstance(self.sizes, ModelSizes) and self.sizes.experts is not None

    @property
    def work(self) -> Workload:
        """What the planner knows of the case."""
        assert isinstance(self.sizes, ModelSizes), "an own model has no plan"
        micro_batch = self.settings["micro_batch"]
        return Workload(
            sizes=self.sizes,
            degrees=self.degrees,
            parallel=self.parallel,
            seq_len=SEQ_LEN,
            micro_batch=micro_batch,
            num_micro_batches=SEQUENCES // micro_batch // self.degrees.num_data_ranks,
            compute_itemsize=4 if self.settings["compute_dtype"] == "float32" else 2,
            balance=BALANCE,
        )

    def __str__(self) -> str:
        """A test's name, for example pp2-tp2-zbv-tied."""
        words = str(self.degrees).split(" x ")
        if self.degrees.pp > 1:
            words.append(self.parallel.schedule)
        if self.degrees.cp > 1:
            words.append(self.parallel.context)
        named = {
            "tied": TIED,
            "qwen": QWEN,
            "heads": MANY_HEADS,
            "own": OWN,
            "mixture": MIXTURE,
            "latent": LATENT,
            "predict": PREDICT,
            "predict-mixture": PREDICT_MIXTURE,
            "predict-tied": PREDICT_TIED,
            "gemma": GEMMA,
            "gpt2": GPT2,
            "neox": NEOX,
            "cohere": COHERE,
            "alibi": ALIBI,
            "smollm": SMOLLM,
        }
        words += [name for name, sizes in named.items() if self.sizes == sizes]
        words += ["narrow"] if self.replays else []
        words += ["documents"] if "eos_id" in self.settings else []
        words += [
            {"float32": "", "bfloat16": "bf16", "float16": "fp16"}[self.settings["compute_dtype"]]
        ]
        others = self.parallel.model_dump(exclude_defaults=True, exclude={"schedule", "context"})
        words += [f"{key}={value}" for key, value in others.items()]
        return "-".join(word for word in words if word)


def case(
    degrees: str,
    sizes: ModelSizes | OwnModel = GROUPED,
    micro_batch: int = 3,
    eos_id: int | None = None,
    compute_dtype: str = "float32",
    replays: bool = False,
    **how: Any,
) -> Case:
    """For example case("pp2 tp2", TIED, schedule="zbv"); `how` makes up the ParallelConfig."""
    named = {
        axis.rstrip("0123456789"): int(axis.lstrip("_abcdefghijklmnopqrstuvwxyz"))
        for axis in degrees.split()
    }
    settings: dict[str, Any] = {"micro_batch": micro_batch, "compute_dtype": compute_dtype}
    if isinstance(sizes, ModelSizes) and sizes.experts is not None and not replays:
        settings["draw_weights"] = with_wide_routers
    if eos_id is not None:
        settings["eos_id"] = eos_id
    return Case(Degrees(**named), sizes, ParallelConfig(**how), settings, replays)


def with_wide_routers(params: LocalParams, stages: Sequence[Transformer], seed: int) -> None:
    """Initial weights with routers that are sure of their choice. Near a tie, rounding would choose
    other experts on another mesh, and 20 steps later the weights would differ by more than
    rounding.
    """
    initialise(params, stages, seed)
    for index, held in enumerate(params.slices):
        if held.name.endswith("router.weight"):
            params.write(index, params.read(index) * 25)


@dataclass
class Life:
    """What one rank saw; tensors of the whole model on rank 0 only."""

    specs: list[ParamSpec]
    slices: list[ParamSlice]
    theta0: dict[str, Tensor]
    num_holders: set[int]
    """How many ranks hold an element of a matrix of the blocks."""
    first_pieces: list[Tensor]
    heldout: tuple[float, int]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    last_pieces: list[Tensor] = field(default_factory=list)
    is_in_place: bool = False
    choices: Choices = field(default_factory=dict)
    """Of this rank's routers."""
    num_flipped: int = 0
    """Number of positions of this rank whose choice was replayed, and would have been another."""
    traffic: list[TrafficRow] = field(default_factory=list)
    """Sent in step COUNTED, by a mixture of experts."""
    rows_to: dict[int, list[int]] = field(default_factory=dict)
    """By layer: rows of step COUNTED whose experts are on each rank of ep."""


@cache
def lives(case: "Key") -> list[Life]:
    """Every rank's life, by rank."""
    given = case.value
    replayed = join([life.choices for life in of(given.reference)]) if given.replays else None
    return run_ranks(live, given.degrees.num_ranks, given, replayed, timeout_seconds=600)


@dataclass(frozen=True)
class Key:
    """A case by its text, which dicts in it keep from being hashed."""

    text: str
    value: Case = field(compare=False)


def of(case: Case) -> list[Life]:
    return lives(Key(repr(case), case))


def live(rank: int, case: Case, replayed: Choices | None = None) -> Life:
    """20 steps on one mesh. Clipping is tested by the norm: unclipped gradients can be compared
    with one another.
    """
    config = OPTIMIZER.model_copy(update={"clip_norm": None, "balance": BALANCE})
    trainer = build_trainer(case.degrees, case.sizes, config, case.parallel, **case.settings)
    if trainer.loss_scale is not None:
        # Far from an overflow, which may happen on one mesh and not on another, and skips a step.
        trainer.loss_scale.exponent = 8
    params = trainer.params
    theta0, holders = whole_model(params)
    last = "out.weight" if case.sizes == OWN else "down_proj.weight"
    num_holders = {
        n for name, held in holders.items() if name.endswith(last) for n in held.flatten().tolist()
    }
    heldout = [batch(1000 + number)[: trainer.settings.micro_batch] for number in range(HELDOUT)]
    groups = island_groups(trainer.mesh, has_experts=case.has_experts)
    life = Life(
        params.specs,
        params.slices,
        theta0 if rank == 0 else {},
        num_holders,
        snapshot(params),
        trainer.evaluate(heldout[trainer.data_rank :: trainer.num_data_ranks]),
    )
    addresses = [params.read(index).data_ptr() for index in range(len(params.slices))]

    def keep_gradients(*_: object) -> None:
        if not life.gradients:
            life.gradients = whole_gradients(trainer)

    register_optimizer_step_pre_hook(keep_gradients)
    log = ChoiceLog(trainer, replayed) if case.has_experts else None
    for step in range(STEPS):
        micro_batches = share(trainer, batch(step))
        assert len(micro_batches) == trainer.micro_batches_per_step
        if log is not None:
            log.begin(step)
        counter = CommCounter(groups) if log is not None and step == COUNTED else nullcontext()
        with counter:
            life.steps.append(trainer.step(micro_batches))
        if isinstance(counter, CommCounter):
            life.traffic = [row for row in counter.rows if row.op != SCALARS]
    if log is not None:
        keep_log(life, log)
    final, _ = whole_model(params)
    life.final = final if rank == 0 else {}
    life.last_pieces = snapshot(params)
    life.is_in_place = addresses == [
        params.read(index).data_ptr() for index in range(len(params.slices))
    ]
    return life


def keep_log(life: Life, log: ChoiceLog) -> None:
    """Keep what the routers of a rank have done."""
    life.choices = log.choices
    life.num_flipped = log.num_flipped
    layers = [layer for step, layer in log.choices if step == COUNTED]
    life.rows_to = {
        layer: log.rows_to(COUNTED, layer, log.trainer.mesh.degrees.ep) for layer in layers
    }


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Every gradient as a matrix put together from all ranks' slices; on rank 0."""
    mine = []
    for index, held in enumerate(trainer.params.slices):
        grad = trainer.params.copies(index)[0].grad
        assert grad is not None, f"{held.name} has no gradient"
        mine.append((held, trainer.params.local_view(index, grad).reshape(held.shape).clone()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return put_together(trainer.params, everyone) if dist.get_rank() == 0 else {"": torch.empty(0)}


def put_together(
    params: LocalParams, everyone: list[list[tuple[ParamSlice, Tensor]]]
) -> dict[str, Tensor]:
    whole = {spec.name: torch.full(spec.matrix_shape, torch.nan) for spec in params.specs}
    for pieces in everyone:
        for held, values in pieces:
            whole[held.name][slice(*held.rows), slice(*held.cols)] = values
    return whole
