"""Check that a model fits a mesh. Every error names the field, the value and a cure. No torch."""

import re
from importlib.metadata import version
from math import gcd

from inner.config import ContextMethod, ExpertsConfig, ParallelConfig
from inner.errors import InputError, nearest_multiples
from inner.flops import layer_costs
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes, OwnModel
from inner.parallel.pipeline.stages import SPLIT_BACKWARD, check_micro_batches, plan_stages
from inner.parallel.weights.zero_stage import has_sparse_experts

SPLITS_SINCE = (2, 13)
"""The first version of torch that splits a backward correctly. 2.11 and 2.12 fail on arguments
without a gradient, and count the gradients of some weights twice."""


def check_layout(
    sizes: ModelSizes,
    degrees: Degrees,
    parallel: ParallelConfig,
    seq_len: int,
    num_micro_batches: int,
) -> None:
    """Raise InputError if the island's mesh cannot hold or run the model.

    `num_micro_batches` is the number of micro-batches per rank and step, see
    mesh.accumulation_steps.
    """
    plan_stages(parallel, layer_costs(sizes, seq_len, parallel.recompute), degrees.pp)
    check_micro_batches(parallel, degrees.pp, num_micro_batches)
    check_torch(parallel, degrees)
    check_whole_weights(parallel, degrees, sizes)
    _check_zero(parallel, degrees)
    _check_compile(parallel, degrees)
    _check_tensor(sizes, degrees.tp)
    _check_experts(sizes, degrees, parallel)
    _check_depths(sizes, seq_len)
    _check_decoder(sizes, degrees, parallel, seq_len)
    check_context(
        parallel.context, seq_len, degrees.cp, degrees.tp, sizes.num_heads, sizes.num_kv_heads
    )
    _check_positions(sizes, degrees, parallel, seq_len)


def check_torch(parallel: ParallelConfig, degrees: Degrees, installed: str | None = None) -> None:
    """Raise InputError if torch is too old for the pipeline's schedule. `installed`: its version;
    None: the one installed.
    """
    if degrees.pp == 1 or parallel.schedule not in SPLIT_BACKWARD:
        return
    installed = installed or version("torch")
    number = re.match(r"(\d+)\.(\d+)", installed)
    if number is not None and (int(number[1]), int(number[2])) < SPLITS_SINCE:
        raise InputError(
            f"island.parallel.schedule: {parallel.schedule} splits the backward, which needs torch "
            f"2.13 or later, but this is {installed}; install torch 2.13, or set schedule to 1f1b, "
            "interleaved_1f1b or breadth_first"
        )


def check_whole_weights(
    parallel: ParallelConfig, degrees: Degrees, model: ModelSizes | OwnModel
) -> None:
    """Raise InputError if the config asks for whole weights (ZeRO-0) on a mesh that shards them."""
    if parallel.zero != 0:
        return
    if degrees.dp_shard > 1:
        raise InputError(
            f"island.parallel.zero: 0 keeps weights whole on each rank, but island.mesh.dp_shard "
            f"({degrees.dp_shard}) shards them; set dp_shard to 1 and dp_replicate to "
            f"{degrees.num_data_ranks}, or "
            "leave zero out"
        )
    if has_sparse_experts(degrees, model):
        raise InputError(
            f"island.parallel.zero: 0 keeps weights whole, but with island.mesh.ep ({degrees.ep}) "
            f"and tp ({degrees.tp}) FSDP shards the experts; set ep and tp to 1, or zero to 2 or "
            "3, or leave it out"
        )


def _check_zero(parallel: ParallelConfig, degrees: Degrees) -> None:
    if parallel.zero == 3 and degrees.pp > 1 and parallel.schedule in SPLIT_BACKWARD:
        # torch 2.13 does not raise here: parameters silently end up with no gradient or with a part
        # of it.
        raise InputError(
            f"island.parallel.zero: 3 frees weights that schedule {parallel.schedule}, which "
            "splits the backward, still needs, and gradients would be lost; set zero to 2 or leave "
            "it out, or schedule to 1f1b, interleaved_1f1b or breadth_first"
        )


def _check_compile(parallel: ParallelConfig, degrees: Degrees) -> None:
    """Raise InputError if the config asks to compile a layout that torch 2.13 cannot compile."""
    obstacle = find_compile_obstacle(parallel, degrees) if parallel.compile is True else None
    if obstacle is not None:
        raise InputError(f"island.parallel.compile: {obstacle}")


def find_compile_obstacle(parallel: ParallelConfig, degrees: Degrees) -> str | None:
    """Return why torch 2.13 cannot compile the blocks of a layout, and what to set; None if it
    can.
    """
    recompute = parallel.recompute
    if degrees.pp > 1 and parallel.schedule in SPLIT_BACKWARD:
        return (
            f"schedule {parallel.schedule} splits the backward into inputs and weights, which a "
            "compiled block cannot do; set compile to false, or schedule to 1f1b, interleaved_1f1b "
            "or breadth_first"
        )
    if degrees.tp > 1 and recompute in ("attention", "full"):
        return (
            f"with island.mesh.tp {degrees.tp}, blocks that recompute {recompute} cannot be "
            "compiled; set recompute to selective or none, or compile to false"
        )
    if degrees.cp > 1 and recompute != "none":
        return (
            f"with island.mesh.cp {degrees.cp}, blocks that recompute {recompute} would run "
            "uncompiled; set recompute to none, or compile to false"
        )
    return None


def _check_experts(sizes: ModelSizes, degrees: Degrees, parallel: ParallelConfig) -> None:
    """Raise InputError if a mixture of experts cannot be spread over the mesh."""
    if sizes.experts is None:
        if degrees.ep > 1:
            raise InputError(
                f"island.mesh.ep ({degrees.ep}): the model has no model.experts; set ep to 1"
            )
        return
    _check_ep(sizes, sizes.experts, degrees)
    if parallel.compile is True:
        raise InputError(
            "island.parallel.compile: blocks with model.experts cannot be compiled, because the "
            "number of rows per expert differs in each step; set compile to false or auto"
        )
    if degrees.cp * degrees.tp > 1 and sizes.experts.capacity is not None:
        raise InputError(
            f"island.mesh (cp {degrees.cp}, tp {degrees.tp}): model.experts.capacity is a limit "
            "per sequence, and "
            "ranks of cp and tp route parts of a sequence; set both to 1, or leave capacity out"
        )


def _check_positions(
    sizes: ModelSizes, degrees: Degrees, parallel: ParallelConfig, seq_len: int
) -> None:
    """Raise InputError if ranks of tp share the positions of a sequence, and not in equal parts."""
    positions = seq_len // degrees.cp
    if positions % degrees.tp == 0:
        return
    if sizes.experts is not None:
        why = "because each rank of tp routes its share of them"
        other_cure = ""
    elif parallel.splits_stream(degrees.tp):
        why = "under sequence parallel"
        other_cure = ", or island.parallel.sequence_parallel to false"
    else:
        return
    raise InputError(
        f"island.mesh.tp ({degrees.tp}) must divide the positions of a rank, data.seq_len "
        f"{seq_len} / cp {degrees.cp} = {positions}, {why}; set data.seq_len to a multiple of "
        f"{degrees.cp * degrees.tp}{other_cure}"
    )


def _check_depths(sizes: ModelSizes, seq_len: int) -> None:
    """Raise InputError if sequences have no target for the last extra depth."""
    if sizes.num_depths >= seq_len:
        raise InputError(
            f"model.predict.depths ({sizes.num_depths}) must be less than data.seq_len "
            f"({seq_len}), because depth d "
            "predicts the token d + 1 positions ahead; lower it"
        )


def _check_decoder(
    sizes: ModelSizes, degrees: Degrees, parallel: ParallelConfig, seq_len: int
) -> None:
    """Raise InputError if the mesh or the sequences do not fit what distinguishes the decoder."""
    learned = sizes.decoder.max_positions
    if learned is not None and seq_len > learned:
        raise InputError(
            f"data.seq_len ({seq_len}) is more than model.decoder.max_positions ({learned}), the "
            "number of learned positions; lower seq_len, or raise max_positions"
        )
    if sizes.decoder.positions == "alibi" and degrees.cp > 1 and parallel.context == "ulysses":
        raise InputError(
            f"island.parallel.context ulysses: with island.mesh.cp ({degrees.cp}) a rank computes "
            "heads of other ranks, and model.decoder.positions alibi has a factor for each head; "
            "set context to ring or all_gather"
        )


def _check_ep(sizes: ModelSizes, experts: ExpertsConfig, degrees: Degrees) -> None:
    """Raise InputError if the experts cannot be divided among the ranks of ep and edp."""
    if experts.number % degrees.ep:
        raise InputError(
            f"island.mesh.ep ({degrees.ep}) must divide model.experts.number ({experts.number}); "
            f"set ep to {_divisors(experts.number, degrees.ep)}, or number to "
            f"{nearest_multiples(experts.number, degrees.ep)}"
        )
    held = experts.number // degrees.ep
    if (
        degrees.has_sparse_mesh
        and degrees.edp > held
        and (experts.dim % degrees.edp or sizes.dim % degrees.edp)
    ):
        raise InputError(
            f"island.mesh: {degrees.edp} ranks share the {held} experts of each rank of ep "
            f"{degrees.ep}, and cut the rows of their matrices, so model.experts.dim "
            f"({experts.dim}) and model.dim ({sizes.dim}) must be multiples of {degrees.edp}; "
            "raise ep, or change these sizes"
        )


def _check_tensor(sizes: ModelSizes, tp: int) -> None:
    for field, value in (("num_heads", sizes.num_heads), ("ffn_dim", sizes.ffn_dim)):
        if value % tp:
            raise InputError(
                f"island.mesh.tp ({tp}) must divide model.{field} ({value}); "
                f"set island.mesh.tp to {_divisors(value, tp)}, or model.{field} to "
                f"{-(-value // tp) * tp}"
            )
    if sizes.num_kv_heads % tp and tp % sizes.num_kv_heads:
        fitting = [
            n
            for n in range(1, tp + 1)
            if sizes.num_heads % n == 0 and (sizes.num_kv_heads % n == 0)
        ]
        raise InputError(
            f"island.mesh.tp ({tp}) must divide model.num_kv_heads ({sizes.num_kv_heads}) or be a "
            f"multiple of it; set island.mesh.tp to {' or '.join(map(str, fitting))}"
        )
    if tp > 1 and sizes.qk_norm == "whole":
        raise InputError(
            f"island.mesh.tp ({tp}): model.qk_norm whole norms all heads together, and the ranks "
            "of tp would have to add up squares in each layer; set tp to 1, or qk_norm to true"
        )
    if sizes.vocab_size < tp:
        raise InputError(
            f"island.mesh.tp ({tp}) is more than model.vocab_size ({sizes.vocab_size}); lower it"
        )


def check_context(
    method: ContextMethod, seq_len: int, cp: int, tp: int, num_heads: int, num_kv_heads: int
) -> None:
    """Raise InputError with a cure if `method` cannot spread such a sequence over cp ranks."""
    if cp == 1:
        return
    unit, words = (cp, "cp") if method == "ulysses" else (2 * cp, "2 x cp")
    if seq_len % unit:
        raise InputError(
            f"data.seq_len ({seq_len}) must be a multiple of {words} = {unit} (island.mesh.cp "
            f"{cp}, island.parallel.context {method}); try data.seq_len "
            f"{nearest_multiples(seq_len, unit)}"
        )
    # If there are fewer key-value heads than ranks of tp, each rank of tp has one key-value head.
    heads = num_heads // tp
    kv_heads = max(num_kv_heads // tp, 1)
    if method == "ulysses" and (heads % cp or kv_heads % cp):
        most = gcd(heads, kv_heads)
        raise InputError(
            f"island.parallel.context ulysses spreads heads over island.mesh.cp ({cp}), but each "
            f"rank of tp {tp} has {heads} of model.num_heads ({num_heads}) and {kv_heads} of "
            f"model.num_kv_heads ({num_kv_heads}); set context to ring or all_gather, or cp to "
            f"{_divisors(most, most)}"
        )


def _divisors(value: int, most: int) -> str:
    return " or ".join(str(n) for n in range(1, most + 1) if value % n == 0)
