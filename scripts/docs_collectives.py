"""The diagrams of docs/collectives.md. What ranks hold after each step is computed by making the
steps.
"""

from collections.abc import Callable

from diloco.planning.mesh.ranks import rank_groups
from inner.mesh import Degrees
from scripts.docs_drawing import Box, draw_arrow, draw_box, draw_line, draw_lines, draw_text, page

RANKS = 4
CELL = 19
Cells = list[list[str]]
"""What each rank holds, piece by piece; empty if nothing."""


def ring_steps() -> tuple[list[Cells], list[Cells]]:
    """How many ranks' numbers are in each piece of each rank: in a ring's reduce-scatter, then in
    its all-gather.
    """
    sums = [[1] * RANKS for _ in range(RANKS)]
    reducing = [as_cells(sums)]
    for step in range(RANKS - 1):
        before = [list(row) for row in sums]
        for rank in range(RANKS):
            piece = (rank - step) % RANKS
            sums[(rank + 1) % RANKS][piece] += before[rank][piece]
        reducing.append(as_cells(sums))
    gathering = []
    for step in range(RANKS - 1):
        before = [list(row) for row in sums]
        for rank in range(RANKS):
            piece = (rank + 1 - step) % RANKS
            sums[(rank + 1) % RANKS][piece] = before[rank][piece]
        gathering.append(as_cells(sums))
    return reducing, gathering


def as_cells(sums: list[list[int]]) -> Cells:
    """The numbers as text."""
    return [[str(number) for number in row] for row in sums]


def exchange(cells: Cells) -> Cells:
    """What ranks hold after an all-to-all: rank r gets piece r of each."""
    return [[cells[source][rank] for source in range(RANKS)] for rank in range(RANKS)]


def draw_cells(top: int, cells: Cells, done: str) -> str:
    """A row of ranks with their pieces; those that are `done`, or begin with it, are green."""
    parts = []
    for rank, pieces in enumerate(cells):
        left = 8 + 88 * rank
        for place, text in enumerate(pieces):
            kind = "commit" if done and text.startswith(done) else "box" if text else "group"
            x = left + (CELL + 1) * place
            parts.append(
                f'<rect class="{kind}" x="{x}" y="{top}" width="{CELL}" height="24" rx="3"/>'
            )
            parts.append(draw_text(x + CELL // 2, top + 16, text, "note", "middle"))
    return "".join(parts)


def draw_ring() -> str:
    """A ring all-reduce of four ranks, step by step: the reduce-scatter, then the all-gather."""
    reducing, gathering = ring_steps()
    parts = [
        draw_text(8 + 88 * rank + 39, 20, f"rank {rank}", "title", "middle")
        for rank in range(RANKS)
    ]
    parts.append(draw_text(8, 44, "each has its own four pieces"))
    top = 52
    for number, cells in enumerate(reducing):
        parts.append(draw_cells(top, cells, str(RANKS)))
        if number == 0:
            parts.append(
                draw_text(8, top + 44, "reduce-scatter: pass one piece on to the right, add")
            )
            top += 16
        top += 36
    parts.append(draw_text(8, top + 6, "all-gather: pass the finished pieces on"))
    top += 14
    for cells in gathering:
        parts.append(draw_cells(top, cells, str(RANKS)))
        top += 36
    parts.append(draw_text(8, top + 8, "a number says how many ranks' values are in a sum"))
    return page(top + 20, "A ring all-reduce of four ranks in six steps", parts)


def draw_all_to_all() -> str:
    """An all-to-all of four ranks: before, who sends to whom, after."""
    before = [[f"{source}{rank}" for rank in range(RANKS)] for source in range(RANKS)]
    after = exchange(before)
    parts = [
        draw_text(8 + 88 * rank + 39, 20, f"rank {rank}", "title", "middle")
        for rank in range(RANKS)
    ]
    parts.append(draw_cells(32, before, "0"))
    for source in range(RANKS):
        for rank in range(RANKS):
            parts.append(
                draw_arrow(
                    (8 + 88 * source + 10 + 20 * rank, 58), (8 + 88 * rank + 10 + 20 * source, 148)
                )
            )
    parts.append(draw_cells(150, after, "0"))
    parts.append(
        draw_lines(8, 196, ("12 is what rank 1 has for rank 2. Green: what came", "from rank 0."))
    )
    return page(222, "An all-to-all of four ranks", parts)


def draw_point_to_point() -> str:
    """Pipeline stages that pass activations down and gradients up, and a ring of cp."""
    parts = [draw_text(8, 20, "pp: neighbours, one micro-batch at a time", "title")]
    for stage in range(4):
        left = 8 + 90 * stage
        parts.append(draw_box(Box(left, 32, 72, 40, f"stage {stage}")))
        if stage < 3:
            parts.append(draw_arrow((left + 72, 44), (left + 88, 44)))
            parts.append(draw_arrow((left + 90, 62), (left + 74, 62)))
    parts.append(draw_text(8, 92, "to the right activations, to the left their gradients"))
    parts.append(draw_text(8, 128, "cp: a ring; keys and values go round", "title"))
    for rank in range(4):
        left = 8 + 90 * rank
        parts.append(draw_box(Box(left, 140, 72, 40, f"rank {rank}")))
        if rank < 3:
            parts.append(draw_arrow((left + 72, 160), (left + 88, 160)))
    parts.append(draw_arrow((314, 180), (314, 200), (44, 200), (44, 183)))
    return page(
        214, "Point-to-point messages: pipeline stages and the ring of context parallelism", parts
    )


def draw_mesh() -> str:
    """Who talks to whom among eight ranks of a mesh pp 2 x dp_shard 2 x tp 2."""
    degrees = Degrees(pp=2, dp_shard=2, tp=2)
    places = {
        rank: (14 + 88 * (rank % 4), 44 + 150 * (rank // 4)) for rank in range(degrees.num_ranks)
    }
    parts = [draw_text(8, 20, "pp 2 x dp_shard 2 x tp 2", "title")]
    for low, high in rank_groups(degrees, "pp"):
        (x, y), (_, below) = places[low], places[high]
        parts += [
            draw_arrow((x + 28, y + 40), (x + 28, below - 3)),
            draw_arrow((x + 40, below), (x + 40, y + 43)),
        ]
    for first, second in rank_groups(degrees, "dp_shard"):
        (x, y), (other, _) = places[first], places[second]
        height = y - 14 if first % 2 == 0 else y + 58
        edge = y if first % 2 == 0 else y + 40
        parts.append(
            draw_line((x + 14, edge), (x + 14, height), (other + 14, height), (other + 14, edge))
        )
    for first, second in rank_groups(degrees, "tp"):
        (x, y), (other, _) = places[first], places[second]
        parts.append(f'<path class="commit" d="M{x + 68} {y + 16}H{other}V{y + 24}H{x + 68}z"/>')
    parts += [draw_box(Box(x, y, 68, 40, f"rank {rank}")) for rank, (x, y) in places.items()]
    words = (
        "green band: tp, many messages in each layer",
        "thin line: dp_shard, weights and gradients of a layer",
        "arrows: pp, one activation for each micro-batch",
    )
    parts.append(draw_lines(8, 282, words))
    return page(326, "Who talks to whom among eight ranks: tp, dp_shard and pp", parts)


def draw_between_islands() -> str:
    """Three islands, three parts: each part goes to its reducer, and its mean comes back to all."""
    tops = (40, 150, 260)
    parts = [draw_text(8, 20, "part p goes to island p, its reducer", "title")]
    for island, top in enumerate(tops):
        parts.append(draw_box(Box(8, top, 132, 76, f"island {island}", kind="group")))
        for part in range(3):
            kind = "commit" if part == island else "box"
            parts.append(
                f'<rect class="{kind}" x="{18 + 38 * part}" y="{top + 32}" width="34" height="32" '
                'rx="4"/>'
            )
            parts.append(draw_text(35 + 38 * part, top + 52, f"p{part}", "note", "middle"))
        parts.append(
            draw_box(
                Box(232, top, 120, 76, f"mean of p{island}", (f"by island {island}",), "commit")
            )
        )
    for island, top in enumerate(tops):
        for part, other in enumerate(tops):
            parts.append(draw_arrow((142, top + 26 + 12 * part), (230, other + 26 + 12 * island)))
    parts.append(
        draw_lines(
            8, 362, ("then each mean, encoded once, goes to all islands", "the same way back")
        )
    )
    return page(390, "The reduce between three islands: an all-to-all of parts, and back", parts)


COLLECTIVES: dict[str, Callable[[], str]] = {
    "ring-all-reduce.svg": draw_ring,
    "all-to-all.svg": draw_all_to_all,
    "point-to-point.svg": draw_point_to_point,
    "mesh-talk.svg": draw_mesh,
    "islands-talk.svg": draw_between_islands,
}
