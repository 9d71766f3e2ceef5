"""What context parallelism demands of a model and a sequence, and what it sends. No torch here."""

from math import gcd

from inner.config import ContextMethod
from inner.errors import InputError


def check_context(method: ContextMethod, seq_len: int, cp: int, tp: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises InputError with a cure if `method` cannot spread such a sequence over cp ranks."""
    if cp == 1:
        return
    _check_positions(method, seq_len, cp)
    if method == "ulysses":
        _check_heads(cp, tp, num_heads, num_kv_heads)


def _check_positions(method: ContextMethod, seq_len: int, cp: int) -> None:
    unit, words = (cp, "cp") if method == "ulysses" else (2 * cp, "2 x cp")
    if seq_len % unit:
        below = seq_len // unit * unit
        cure = f"{below} or {below + unit}" if below else f"{unit}"
        raise InputError(
            f"data.seq_len ({seq_len}) must be a multiple of {words} = {unit} (island.mesh.cp {cp}, "
            f"island.parallel.context {method}); try data.seq_len {cure}"
        )


def _check_heads(cp: int, tp: int, num_heads: int, num_kv_heads: int) -> None:
    """Of fewer key-value heads than ranks of tp, each rank of tp has one."""
    heads, kv_heads = num_heads // tp, max(num_kv_heads // tp, 1)
    if heads % cp or kv_heads % cp:
        most = gcd(heads, kv_heads)
        allowed = " or ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise InputError(
            f"island.parallel.context ulysses spreads heads over island.mesh.cp ({cp}), but each rank of tp {tp} has "
            f"{heads} of model.num_heads ({num_heads}) and {kv_heads} of model.num_kv_heads ({num_kv_heads}); "
            f"set context to ring or all_gather, or cp to {allowed}"
        )


def bytes_per_attention(
    method: ContextMethod,
    q_shape: tuple[int, int, int, int],
    num_kv_heads: int,
    cp: int,
    itemsize: int,
    *,
    has_documents: bool = False,
) -> tuple[int, int]:
    """Bytes that a rank sends in one attention, (forward, backward); `q_shape` is (B, S, H, E) of the whole sequence.

    With n = B S / cp positions of its own, K key-value heads and gradients in at least fp32:

                  forward                                backward
    ring          (cp - 1) 2 n K E                       the same, and (cp - 1) 2 n K E of gradients
    all_gather    as ring                                as ring
    ulysses       (cp - 1) / cp n (2 H + 2 K) E          the same
    """
    B, S, H, E = q_shape
    num_positions = B * S // cp
    # int64 each; they go where keys go.
    documents = (cp - 1) * num_positions * 8 if has_documents else 0
    if method == "ulysses":
        traded = (cp - 1) * num_positions * (2 * H + 2 * num_kv_heads) * E // cp * itemsize
        return traded + documents, traded
    keys = (cp - 1) * 2 * num_positions * num_kv_heads * E
    return keys * itemsize + documents, keys * (itemsize + max(itemsize, 4)) + documents
