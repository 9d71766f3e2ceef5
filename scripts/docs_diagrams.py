"""Draws the diagrams of docs/ as SVG, narrow enough for a phone.

python -m scripts.docs_diagrams [--into FOLDER]
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from scripts.docs_collectives import COLLECTIVES
from scripts.docs_drawing import (
    IMAGES,
    Box,
    draw_arrow,
    draw_box,
    draw_line,
    draw_lines,
    draw_text,
    page,
)


def draw_round() -> str:
    """The states of an island in a round, and what leads from one to the next."""
    left = 62
    width = 206
    states = [
        Box(left, 12, width, 52, "Training", ("inner steps",)),
        Box(left, 112, width, 52, "Gathering", ("all wait until a plan is made",)),
        Box(left, 212, width, 52, "Reducing", ("the mean, part by part",)),
        Box(left, 312, width, 52, "Voting", ("the digest of the next state",)),
        Box(left, 412, width, 52, "Commit", ("outer step, new local params",), "commit"),
    ]
    middle = left + width // 2
    labels = [
        "its steps are done: “ready”",
        "a plan is made",
        "the reduce ended",
        "all yes, one digest",
    ]
    parts = [draw_box(state) for state in states]
    for row, label in enumerate(labels):
        top = 64 + 100 * row
        parts += [
            draw_arrow((middle, top), (middle, top + 46)),
            draw_text(middle + 8, top + 28, label),
        ]
    right = left + width
    abort = draw_arrow((right, 338), (right + 24, 338), (right + 24, 138), (right + 4, 138))
    back = draw_arrow((left, 438), (left - 20, 438), (left - 20, 38), (left - 4, 38))
    words = [
        draw_text(right + 30, 218, "abort:"),
        draw_text(right + 30, 234, "nothing"),
        draw_text(right + 30, 250, "has"),
        draw_text(right + 30, 266, "changed"),
        draw_text(4, 228, "next"),
        draw_text(4, 244, "steps"),
    ]
    return page(476, "States of an island in a round", [*parts, abort, back, *words])


def draw_islands() -> str:
    """Two islands of unequal meshes, their carriers, and the link between them."""
    first = [
        Box(8, 8, 344, 150, "Island 0: FSDP over 4 ranks", kind="group"),
        *(Box(20 + 82 * rank, 40, 74, 52, f"rank {rank}", ("a quarter",)) for rank in range(4)),
        Box(20, 104, 320, 42, "one flat fp32 vector, in parts"),
    ]
    second = [
        Box(8, 238, 344, 150, "Island 1: 2 pipeline stages", kind="group"),
        Box(20, 270, 320, 42, "the same vector, the same parts"),
        *(
            Box(20 + 164 * stage, 324, 156, 52, f"stage {stage}", ("half of the layers",))
            for stage in range(2)
        ),
    ]
    parts = [draw_box(box) for box in [*first, *second]]
    parts += [draw_arrow((296, 146), (296, 266)), draw_arrow((324, 270), (324, 150))]
    parts += [
        draw_text(20, 182, "pseudo-gradients, encoded, part by part;"),
        draw_text(20, 200, "plan and votes between the leaders;"),
        draw_text(20, 218, "over TLS, hivemind or gloo"),
    ]
    return page(396, "Two islands with unequal meshes share one canonical space", parts)


def draw_seam() -> str:
    """The same layers in two islands, what crosses between them, and where they meet."""
    layers = [
        Box(8, 40, 160, 72, "inner/", ("model, FSDP2, AdamW", "Trainer.step()")),
        Box(8, 150, 160, 56, "LocalParams", ("slices of it, by name",), "other"),
        Box(8, 244, 160, 56, "Redistribution", ("slices to parts, and back",)),
        Box(8, 312, 160, 56, "Codec", ("global minus local",)),
        Box(8, 380, 160, 56, "Reducer", ("means, part by part",)),
        Box(8, 448, 160, 56, "RoundProtocol", ("ready, plan, vote",)),
        Box(8, 516, 160, 56, "OuterOptimizer", ("fp32; sharded or whole",), "commit"),
    ]
    others = [
        Box(box.x + 184, box.y, box.width, box.height, box.title, box.lines, box.kind)
        for box in layers
    ]
    parts = [draw_box(box) for box in [*layers, *others]]
    parts.append(draw_text(88, 24, "island 0: four ranks", "title", "middle"))
    parts.append(draw_text(272, 24, "island 1: one process", "title", "middle"))
    for middle in (88, 272):
        parts += [
            draw_arrow((middle - 8, 112), (middle - 8, 148)),
            draw_arrow((middle + 8, 150), (middle + 8, 114)),
        ]
        parts += [
            draw_arrow((middle - 8, 206), (middle - 8, 242)),
            draw_arrow((middle + 8, 244), (middle + 8, 208)),
        ]
        parts.append(draw_arrow((middle, 572), (middle, 618)))
    parts.append(draw_text(180, 135, "every H steps", anchor="middle"))
    parts.append(draw_text(180, 229, "the seam", "title", "middle"))
    for height in (408, 476):
        parts += [
            draw_arrow((168, height - 6), (190, height - 6)),
            draw_arrow((192, height + 6), (170, height + 6)),
        ]
    swarm = Box(
        8,
        620,
        344,
        56,
        "swarm: a rendezvous, or hivemind's DHT",
        ("who is in the run, and the run's config",),
    )
    parts.append(draw_box(swarm))
    return page(686, "The layers of two islands, and what crosses between them", parts)


def draw_building() -> str:
    """How a rank of an island is built, from the config to an inner step."""
    steps = [
        ("Degrees, IslandMesh", "pp, dp_replicate, fsdp = dp_shard x cp, tp", "mesh.py"),
        ("Transformer of a stage, on meta", "a model without memory", "model/transformer.py"),
        ("attend, if cp > 1", "ring, all_gather or ulysses", "parallel/context/"),
        ("Cut matrices, if tp > 1", "and the stream along the sequence", "parallel/tensor.py"),
        ("Recompute", "what the backward computes again", "parallel/recompute.py"),
        ("torch.compile", "each block", "parallel/compile.py"),
        (
            "fully_shard, or whole replicas",
            "if several ranks have the same weights",
            "parallel/weights/",
        ),
        (
            "Initial weights",
            "by seed and name, or slices of a folder",
            "model/init.py, huggingface/load.py",
        ),
        ("Copies in the compute dtype", "without FSDP", "parallel/weights/compute_copies.py"),
        ("OneStage or Pipeline", "torch's schedules, if pp > 1", "parallel/pipeline/"),
    ]
    parts = []
    for row, (title, what, where) in enumerate(steps):
        top = 8 + 88 * row
        parts.append(draw_box(Box(20, top, 320, 70, title, (what, f"inner/{where}"))))
        parts.append(draw_arrow((180, top + 70), (180, top + 86)))
    top = 8 + 88 * len(steps)
    lines = ("count tokens, backward, one all-reduce of loss", "and norm, clip, optimizers")
    parts.append(draw_box(Box(20, top, 320, 70, "Trainer.step", lines, "commit")))
    return page(top + 78, "How a rank is built, from the config to an inner step", parts)


def draw_messages() -> str:
    """The messages of a round between three islands; time goes down."""
    lanes = {"A": 60, "B": 180, "C": 300}
    left, middle, right = lanes.values()
    parts = [draw_line((x, 44), (x, 500)) for x in lanes.values()]
    parts.append(draw_box(Box(left - 50, 8, 100, 36, "A, planner")))
    parts.append(draw_box(Box(middle - 40, 8, 80, 36, "B")))
    parts.append(draw_box(Box(right - 40, 8, 80, 36, "C")))
    told = [
        (70, "ready: round, tokens, digest", [(middle, left), (right, left)]),
        (136, "plan: the attempt, who takes part, in order", [(left, middle), (left, right)]),
    ]
    for top, words, arrows in told:
        parts.append(draw_text(180, top, words, "label", "middle"))
        for row, (begin, end) in enumerate(arrows):
            parts.append(draw_arrow((begin, top + 12 + 18 * row), (end, top + 18 + 18 * row)))
    parts.append(draw_box(Box(20, 196, 320, 84, "Payloads to each part's reducer")))
    parts.append(draw_box(Box(20, 296, 320, 84, "The means, from each part's reducer")))
    for top in (240, 340):
        for begin, end in ((left, middle), (middle, right)):
            parts.append(draw_arrow((begin + 6, top), (end - 6, top)))
            parts.append(draw_arrow((end - 6, top + 12), (begin + 6, top + 12)))
        parts.append(draw_arrow((left + 6, top + 26), (right - 6, top + 26)))
    parts.append(
        draw_text(180, 406, "vote, to all others: the next state's digest", "label", "middle")
    )
    for row, (begin, end) in enumerate([(left, middle), (middle, right), (right, left)]):
        parts.append(draw_arrow((begin, 416 + 16 * row), (end, 422 + 16 * row)))
    parts.append(draw_text(180, 484, "a receipt for each vote; then", "label", "middle"))
    lines = ("all have the same bits, or nobody has changed any",)
    parts.append(
        draw_box(Box(8, 500, 344, 56, "Commit: outer step, new local params", lines, "commit"))
    )
    return page(566, "The messages of a round between three islands", parts)


def draw_ledger() -> str:
    """The order of the text, what of it is trained and leased, and the frontier."""
    cells = [
        Box(8, 40, 100, 44, "trained", (), "commit"),
        Box(108, 40, 74, 44, "leased", (), "box"),
        Box(182, 40, 86, 44, "returned", (), "other"),
        Box(268, 40, 84, 44, "never", (), "group"),
    ]
    parts = [draw_text(8, 26, "units of text, in reading order: 0, 1, 2, ...")]
    parts += [draw_box(box) for box in cells]
    parts.append(draw_arrow((268, 112), (268, 88)))
    parts.append(draw_text(268, 130, "frontier", "title", "middle"))
    words = (
        "A commit moves what its participants have read to",
        "“trained”, and leases new units to them: first from",
        "the returned ones, then from the frontier on.",
    )
    parts.append(draw_lines(8, 160, words))
    return page(206, "The data ledger: trained, leased and returned units, and the frontier", parts)


def draw_coordinator() -> str:
    """Among more than four islands all speak with one of them; payloads still go from all to
    all.
    """
    rim = [(60, 60), (300, 60), (40, 190), (320, 190), (100, 300), (260, 300)]
    parts = []
    for x, y in rim:
        parts.append(draw_line((180, 180), (x, y)))
    for x, y in rim:
        parts.append(draw_box(Box(x - 34, y - 18, 68, 36, "island")))
    parts.append(draw_box(Box(122, 150, 116, 58, "coordinator", ("the fastest island",), "commit")))
    words = (
        "To it go ready, status and votes; from it come the",
        "plan and the votes of all. When it is lost, each",
        "island writes to all others until the next commit.",
    )
    parts.append(draw_lines(20, 350, words))
    return page(396, "Among more than four islands all speak with a coordinator", parts)


DIAGRAMS: dict[str, Callable[[], str]] = {
    "round.svg": draw_round,
    "islands.svg": draw_islands,
    "seam.svg": draw_seam,
    "building.svg": draw_building,
    "messages.svg": draw_messages,
    "ledger.svg": draw_ledger,
    "coordinator.svg": draw_coordinator,
    **COLLECTIVES,
}


def draw_all(folder: Path) -> list[Path]:
    """Write all diagrams into the folder and return their paths."""
    paths = []
    for name, draw in DIAGRAMS.items():
        path = folder / name
        path.write_text(draw())
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=IMAGES)
    print(*draw_all(parser.parse_args().into), sep="\n")
