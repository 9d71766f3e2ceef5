"""Check that ranks of an island which hold the same part of a parameter hold equal copies of it."""

from collections import Counter

from diloco.errors import ConfigError
from diloco.own_loop.model.params import describe
from diloco.own_loop.model.ranks import WHOLE_MODEL, check_same
from inner.params import LocalParams
from outer.space.digest import part_digest
from outer.space.ranks import RankGroup


def check_ranks(ranks: RankGroup, params: LocalParams) -> str:
    """Return `describe` of the parameters. Raises ConfigError on every rank unless all hold shards
    or copies of them.

    Every rank must call it.
    """
    text = describe(params.specs)
    check_same(ranks, text, "what is trained of the model")
    check_copies(ranks, params)
    return text


def check_copies(ranks: RankGroup, params: LocalParams) -> None:
    """Raise ConfigError on every rank if two ranks hold the same rectangle of a parameter with
    different values.

    Such ranks would be taken for replicas, and their values would be mixed. It happens with stages
    of a pipeline whose layers are numbered from 0 on each rank, and with tensor parallelism whose
    shards are not DTensors.
    """
    holders = Counter(held for slices in ranks.gather(params.slices) for held in slices)
    shared = {held: index for index, held in enumerate(params.slices) if holders[held] > 1}
    digests = {held: part_digest(params.read(index)) for held, index in shared.items()}
    first: dict[object, tuple[int, bytes]] = {}
    for rank, theirs in enumerate(ranks.gather(digests)):
        for held, digest in theirs.items():
            other, expected = first.setdefault(held, (rank, digest))
            if digest != expected:
                raise ConfigError(
                    f"ranks {other} and {rank} of this island hold the same part of {held.name!r} (rows "
                    f"{held.rows[0]} to {held.rows[1]}, columns {held.cols[0]} to {held.cols[1]}) with different "
                    f"values: digests {expected.hex()[:12]} and {digest.hex()[:12]}. {WHOLE_MODEL}"
                )
