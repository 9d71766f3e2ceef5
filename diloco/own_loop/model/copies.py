"""Check that the ranks of an island hold the whole model, and equal copies where they hold the same
part of it.
"""

from diloco.errors import ConfigError
from diloco.own_loop.model.ranks import WHOLE_MODEL
from inner.params import LocalParams
from outer.errors import InputError
from outer.space.digest import part_digest
from outer.space.holdings import Holdings, check_coverage, pack_slices
from outer.space.layout import Space
from outer.space.ranks import RankGroup


def check_held(ranks: RankGroup, params: LocalParams) -> None:
    """Raise ConfigError on every rank unless the ranks hold every parameter once, or in equal
    copies.

    Every rank must call it.
    """
    space = Space(params.specs, part_elements=1 << 40)
    holdings = Holdings(space, ranks.gather(pack_slices(params.slices)))
    try:
        check_coverage(space, holdings)
    except InputError as error:
        raise ConfigError(f"{error}. {WHOLE_MODEL}") from None
    check_copies(ranks, params, holdings)


def check_copies(ranks: RankGroup, params: LocalParams, holdings: Holdings) -> None:
    """Raise ConfigError on every rank if two ranks hold the same rectangle of a parameter with
    different values.

    Such ranks would be taken for replicas, and their values would be mixed. It happens with stages
    of a pipeline whose layers are numbered from 0 on each rank, and with tensor parallelism whose
    shards are not DTensors. Every rank must call it.
    """
    slice_index = {
        (held.name, held.rows, held.cols): index for index, held in enumerate(params.slices)
    }
    shared = [row for row in holdings.of_rank(ranks.rank) if len(holdings.holders(row)) > 1]
    digests = {
        row: part_digest(params.read(slice_index[holdings.rectangle(row)])) for row in shared
    }
    first: dict[int, tuple[int, bytes]] = {}
    for rank, theirs in enumerate(ranks.gather(digests)):
        for row, digest in theirs.items():
            other, expected = first.setdefault(row, (rank, digest))
            if digest != expected:
                held = holdings.rectangle(row)
                raise ConfigError(
                    f"ranks {other} and {rank} of this island hold the same part of {held.name!r} "
                    f"(rows {held.rows[0]} to {held.rows[1]}, columns {held.cols[0]} to "
                    f"{held.cols[1]}) with different values: digests {expected.hex()[:12]} and "
                    f"{digest.hex()[:12]}. {WHOLE_MODEL}"
                )
