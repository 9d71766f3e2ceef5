"""Attention over the ranks of cp equals attention of the whole sequence: all cases in one life of
ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from inner.config import ContextMethod
from inner.dry_run.comm_counter import CommCounter
from inner.errors import InputError
from inner.model.attention import Attend, causal_attention
from inner.model.rope import rotate
from inner.parallel.context.build import build_attend, rank_positions
from inner.parallel.layout_check import check_context
from tests.harness import run_ranks
from tests.inner.sequences import (
    BANDS,
    B,
    Case,
    E,
    H,
    Inputs,
    bytes_per_attention,
    expected,
    inputs,
    pack_at,
    strided,
    with_gradients,
)
from tests.inner.small import relative_error

METHODS: tuple[ContextMethod, ...] = get_args(ContextMethod)
DEGREES = (2, 4)


def cases(cp: int) -> list[Case]:
    """Multi-head, grouped and multi-query attention; ulysses where the heads divide."""
    every = [Case(*values) for values in product(METHODS, (4, 2, 1), (False, True), BANDS)]
    return [case for case in every if case.method != "ulysses" or case.num_kv_heads % cp == 0]


@dataclass
class Seen:
    """What one rank saw."""

    errors: dict[Case, list[float]] = field(default_factory=dict)
    """Relative, of y, dq, dk and dv."""
    sent: dict[Case, tuple[int, int]] = field(default_factory=dict)
    scores: dict[Case, int] = field(default_factory=dict)
    saved: dict[Case, float] = field(default_factory=dict)
    """Bytes kept for the backward, over those of the whole sequence."""
    mask_bytes: dict[Case, int] = field(default_factory=dict)
    long_errors: list[float] = field(default_factory=list)
    rope_errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    repeats: dict[str, list[bool]] = field(default_factory=dict)


def share(given: Inputs, method: ContextMethod, here: Tensor, dtype: torch.dtype) -> Inputs:
    """A rank's positions, in the dtype of the case and with a non-contiguous layout."""
    *floats, packing = given
    if packing is not None and method != "ulysses":
        packing = pack_at(packing.sequences_BT, here)
    return Inputs(*(strided(x[:, here].to(dtype)) for x in floats), packing)


class Scores(TorchDispatchMode):
    """Counts the attention scores that kernels compute, over all heads and sequences."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            q, k, *_ = args
            is_causal = len(args) > 4 and args[4]
            pairs = q.shape[2] * (q.shape[2] + 1) // 2 if is_causal else q.shape[2] * k.shape[2]
            self.total += q.shape[0] * q.shape[1] * pairs
        return func(*args, **(kwargs or {}))


def bytes_sent(work: Callable[[], Any]) -> tuple[Any, int]:
    assert dist.group.WORLD is not None
    with CommCounter({"cp": dist.group.WORLD}) as ledger:
        result = work()
    return result, sum(row.sent_bytes for row in ledger.rows)


def bytes_saved(attend: Attend, given: Inputs) -> int:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(*(x.detach().requires_grad_() for x in given[:3]), given.packing)
    return sum(saved)


def attend_everywhere(rank: int, cp: int) -> Seen:
    assert dist.group.WORLD is not None
    seen = Seen()
    for case in cases(cp):
        attend = build_attend(case.method, dist.group.WORLD)
        seq_len = 24 * cp
        here = rank_positions(case.method, seq_len, cp, rank)
        given = inputs(case, seq_len)
        mine = share(given, case.method, here, case.dtype)
        got = with_gradients(attend, mine)
        assert all(x.dtype == case.dtype for x in got)
        seen.errors[case] = [
            relative_error(x.double(), y[:, here])
            for x, y in zip(got, expected(given), strict=True)
        ]
        if case.dtype != torch.float64:
            count(seen, case, attend, mine)
            seen.saved[case] = bytes_saved(attend, mine) / bytes_saved(
                causal_attention,
                share(given, case.method, torch.arange(seq_len), case.dtype)._replace(packing=None),
            )
    for method in METHODS:
        attend = build_attend(method, dist.group.WORLD)
        seen.repeats[method] = repeats(attend, rank, cp, method)
        seen.rope_errors[method] = rotated(attend, rank, cp, method)
    seen.long_errors = long_sequence(rank, cp)
    return seen


def count(seen: Seen, case: Case, attend: Attend, mine: Inputs) -> None:
    """Bytes sent in forward and backward, scores of the forward, and kept bytes that documents
    add.
    """
    leaves = [x.detach().requires_grad_() for x in mine[:3]]
    with Scores() as scores:
        y, forward = bytes_sent(lambda: attend(leaves[0], leaves[1], leaves[2], mine.packing))
    _, backward = bytes_sent(lambda: torch.autograd.grad(y, leaves, mine.dy))
    seen.sent[case] = forward, backward
    seen.scores[case] = scores.total
    seen.mask_bytes[case] = bytes_saved(attend, mine) - bytes_saved(
        attend, mine._replace(packing=None)
    )


def repeats(attend: Attend, rank: int, cp: int, method: ContextMethod) -> list[bool]:
    """Whether a repeated forward (in the backward of a checkpoint, or without autograd) gives the
    same bits.
    """
    case = Case(method, H, True, torch.float32)
    mine = share(
        inputs(case, 24 * cp), method, rank_positions(method, 24 * cp, cp, rank), case.dtype
    )
    first = with_gradients(attend, mine)
    second = with_gradients(lambda *given: checkpoint(attend, *given, use_reentrant=False), mine)
    with torch.no_grad():
        third = attend(mine.q, mine.k, mine.v, mine.packing)
    return [torch.equal(x, y) for x, y in zip([*first, first[0]], [*second, third], strict=True)]


def rotated(attend: Attend, rank: int, cp: int, method: ContextMethod) -> tuple[float, float]:
    """Errors of y when q and k are rotated by their position, and by their index on the rank."""
    case = Case(method, H, False, torch.float32)
    seq_len = 24 * cp
    here = rank_positions(method, seq_len, cp, rank)
    q, k, v, _, _ = (None if x is None else x.float() for x in inputs(case, seq_len))
    assert q is not None and k is not None and v is not None

    def turn(x: Tensor, at: Tensor) -> Tensor:
        angles = torch.outer(at.float(), 0.3 ** torch.arange(E // 2))
        cos, sin = angles.cos(), angles.sin()
        return rotate(
            x, torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))
        )

    everywhere, by_place = torch.arange(seq_len), torch.arange(len(here))
    whole = causal_attention(turn(q, everywhere), turn(k, everywhere), v)[:, here]
    right, wrong = (
        attend(turn(q[:, here], at), turn(k[:, here], at), v[:, here].contiguous(), None)
        for at in (here, by_place)
    )
    return relative_error(right, whole), relative_error(wrong, whole)


def long_sequence(rank: int, cp: int) -> list[float]:
    """Errors at a length for which the kernel works in tiles, some without any visible key."""
    assert dist.group.WORLD is not None
    case = Case("ring", 1, True, torch.float32)
    here = rank_positions("ring", 1536, cp, rank)
    given = inputs(case, 1536)
    got = with_gradients(
        build_attend("ring", dist.group.WORLD), share(given, "ring", here, case.dtype)
    )
    return [
        relative_error(x.double(), y[:, here]) for x, y in zip(got, expected(given), strict=True)
    ]


@pytest.fixture(scope="module", params=DEGREES)
def life(request: pytest.FixtureRequest) -> tuple[int, list[Seen]]:
    return request.param, run_ranks(
        attend_everywhere, request.param, request.param, timeout_seconds=600
    )


@pytest.mark.parametrize("dtype", BANDS, ids=str)
@pytest.mark.parametrize("has_documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("method", METHODS)
def test_attention_and_all_gradients_equal_those_of_the_whole_sequence(
    life, method, has_documents, dtype
):
    cp, ranks = life
    chosen = [
        case for case in cases(cp) if case[0] == method and case[2:] == (has_documents, dtype)
    ]
    assert chosen
    for case, seen in product(chosen, ranks):
        assert all(error <= BANDS[dtype] for error in seen.errors[case]), (case, seen.errors[case])


def test_keys_that_no_query_of_a_tile_sees_change_nothing(life):
    assert all(error <= 1e-5 for seen in life[1] for error in seen.long_errors)


@pytest.mark.parametrize("method", METHODS)
def test_rope_follows_the_positions_and_not_the_index_on_the_rank(life, method):
    right, wrong = zip(*(seen.rope_errors[method] for seen in life[1]), strict=True)
    assert max(right) <= 1e-5
    assert max(wrong) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_forward_run_again_or_without_autograd_changes_no_bit(life, method):
    assert all(all(seen.repeats[method]) for seen in life[1])


@pytest.mark.parametrize("method", METHODS)
def test_ranks_send_the_bytes_of_the_formula(life, method):
    cp, ranks = life
    for case in [case for case in ranks[0].sent if case.method == method]:
        itemsize = torch.empty((), dtype=case.dtype).element_size()
        formula = bytes_per_attention(method, (B, 24 * cp, H, E), case.num_kv_heads, cp, itemsize)
        assert all(seen.sent[case] == formula for seen in ranks), case


@pytest.mark.parametrize("method", METHODS)
def test_every_rank_computes_its_share_of_the_scores_and_no_more(life, method):
    cp, ranks = life
    case = Case(method, H, False, torch.float32)
    everything = B * H * 24 * cp * (24 * cp + 1) // 2
    assert {seen.scores[case] for seen in ranks} == {everything // cp}


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_keeps_its_share_for_the_backward(life, method):
    cp, ranks = life
    for seen in ranks:
        assert seen.saved[Case(method, H, False, torch.float32)] == pytest.approx(1 / cp, rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_documents_add_nothing_to_what_is_kept_but_their_bounds(life, method):
    case = Case(method, H, True, torch.float32)
    assert all(0 <= seen.mask_bytes[case] < B * 24 * life[0] * 8 for seen in life[1])


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_every_position_is_on_one_rank_in_rising_order(method, cp):
    held = [rank_positions(method, 96, cp, rank) for rank in range(cp)]
    assert torch.cat(held).sort().values.tolist() == list(range(96))
    assert all(len(mine) == 96 // cp and (mine.diff() > 0).all() for mine in held)


def test_zigzag_gives_each_rank_the_same_work_and_contiguous_does_not():
    def most_over_mean(method: ContextMethod) -> float:
        work = [int((rank_positions(method, 256, 4, rank) + 1).sum()) for rank in range(4)]
        return max(work) / (sum(work) / 4)

    assert most_over_mean("ring") == most_over_mean("all_gather") == 1.0
    assert most_over_mean("ulysses") > 1.7


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            ("ring", 100, 4, 1, 8, 8),
            ["data.seq_len (100)", "2 x cp = 8", "try data.seq_len 96 or 104"],
        ),
        (("all_gather", 6, 4, 1, 8, 8), ["data.seq_len (6)", "try data.seq_len 8"]),
        (("ulysses", 102, 4, 1, 8, 8), ["data.seq_len (102)", "cp = 4", "100 or 104"]),
        (
            ("ulysses", 96, 4, 1, 8, 2),
            ["model.num_kv_heads (2)", "cp (4)", "ring or all_gather", "cp to 1 or 2"],
        ),
        (
            ("ulysses", 96, 4, 2, 8, 4),
            ["4 of model.num_heads (8)", "2 of model.num_kv_heads (4)", "tp 2"],
        ),
        (("ulysses", 96, 3, 1, 4, 4), ["model.num_heads (4)", "cp to 1 or 2 or 4"]),
    ],
)
def test_what_does_not_divide_is_refused_with_a_cure(asked, words):
    with pytest.raises(InputError) as refused:
        check_context(*asked)
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    "asked", [("ring", 96, 4, 1, 4, 1), ("all_gather", 7, 1, 1, 4, 1), ("ulysses", 96, 2, 2, 8, 4)]
)
def test_what_divides_is_accepted(asked):
    check_context(*asked)
