"""How a folder names and arranges the tensors of a model. No torch here.

In both layouts a matrix is (outputs, inputs), except in gpt2, where it is the reverse. RoPE rotates
the pairs (e, e + P) of a head here, where P is half the size of the part that turns, and in most
model types. The files of deepseek_v3 and cohere have the two of a pair next to each other, (2 e, 2
e + 1), so the rows that RoPE turns are in another order there. Some types hold several matrices as
one tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from inner.expert_names import router_bias_name
from inner.huggingface.mixtures import has_biases
from inner.huggingface.model_types import choose_model_type
from inner.huggingface.names import FALCON_NORMS, QKV, Fused, huggingface_name, names_of
from inner.model.block_params import BLOCK_PARAMS
from inner.model.sizes import ModelSizes
from inner.param_spec import ParamSpec

LAYER = "model.layers."
PARAMS = {param.name: param for param in BLOCK_PARAMS}


@dataclass(frozen=True)
class FileLayout:
    """Names and order of a model's tensors in a folder."""

    sizes: ModelSizes
    model_type: str
    is_interleaved: bool = False
    """Whether the pairs that RoPE rotates in latent attention are next to each other."""
    num_predictors: int = 0
    """Number of layers in the folder, behind the model's own, that predict further tokens. The
    model has the first of them, one for each of its extra depths.
    """

    @cached_property
    def biases(self) -> tuple[ParamSpec, ...]:
        """The routers' biases in the folder. They are no parameters, but saved with them."""
        if self.sizes.experts is None or not has_biases(self.model_type):
            return ()
        shape = (self.sizes.experts.number,)
        return tuple(
            ParamSpec(router_bias_name(layer), shape) for layer in self.sizes.expert_layers
        )

    def name(self, name: str) -> str:
        """Return the name of a tensor in the folder, given its full name here. Fused matrices have
        one name.
        """
        is_parallel_falcon = (
            self.model_type == "falcon" and self.sizes.decoder.parallel == "two_norms"
        )
        return huggingface_name(name, self.model_type, FALCON_NORMS if is_parallel_falcon else None)

    def rows(self, name: str, rows: Sequence[int]) -> list[int] | None:
        """Return for some of a parameter's rows the number that each has in the folder; None if the
        order is the same.
        """
        turned = self._turned_rows(name, rows)
        fused = self._fused(name)
        if fused is None:
            return turned
        (whole, part) = fused
        given = list(rows) if turned is None else turned
        return (
            self._rows_by_key_head(part, given)
            if whole.order == "by key head"
            else self._rows_behind(name, given)
        )

    def full_name(self, their_name: str) -> str:
        """Return the name of a tensor in the folder with the beginning that save_pretrained gives
        it. The first files of GPT-2 lack it.
        """
        names = names_of(self.model_type)
        prefix = names.layers.partition(".")[0] + "."
        is_whole = their_name.startswith((prefix, names.outside["head"]))
        return their_name if is_whole or prefix == "model." else prefix + their_name

    def _turned_rows(self, name: str, rows: Sequence[int]) -> list[int] | None:
        """Return the places of rows where the pairs that RoPE turns are next to each other; None if
        they are not.
        """
        if self.model_type == "cohere" and name.endswith(
            ("attention.q_proj.weight", "attention.q_proj.bias")
        ):
            return [_stored_row(row, 0, self.sizes.head_dim) for row in rows]
        if self.model_type == "cohere" and name.endswith(
            ("attention.k_proj.weight", "attention.k_proj.bias")
        ):
            return [_stored_row(row, 0, self.sizes.head_dim) for row in rows]
        latent = self.sizes.latent
        if latent is None or not self.is_interleaved:
            return None
        if name.endswith(("attention.q_proj.weight", "attention.q_b_proj.weight")):
            return [_stored_row(row, latent.nope_dim, latent.rope_dim) for row in rows]
        if name.endswith("attention.kv_a_proj.weight"):
            return [_stored_row(row, latent.kv_rank, latent.rope_dim) for row in rows]
        return None

    def _fused(self, name: str) -> tuple[Fused, str] | None:
        """Return the matrix of a folder that a parameter is a part of, and the parameter's module
        in its block.
        """
        module = name.rpartition(".")[0]
        for fused in names_of(self.model_type).fused:
            for part in fused.parts:
                if module.endswith(f".{part}"):
                    return fused, part
        return None

    def _rows_by_key_head(self, part: str, rows: Sequence[int]) -> list[int]:
        """Return the places of rows of queries, keys or values that lie together for each key-value
        head.
        """
        size = self.sizes.head_dim
        per_key_head = self.sizes.num_heads // self.sizes.num_kv_heads
        kind = QKV.index(part)
        places: list[int] = []
        for row in rows:
            (head, place) = divmod(row, size)
            (group, member) = (
                divmod(head, per_key_head) if kind == 0 else (head, per_key_head + kind - 1)
            )
            places.append((group * (per_key_head + 2) + member) * size + place)
        return places

    def _rows_behind(self, name: str, rows: Sequence[int]) -> list[int]:
        """Return the places of rows of a matrix that lies behind others."""
        before = 0
        for other in self.parts(name):
            if other == name:
                break
            before += self._shape(other)[0]
        return [before + row for row in rows]

    def parts(self, name: str) -> list[str]:
        """Return the full names of all parameters that the folder holds together with this one, in
        order.
        """
        fused = self._fused(name)
        if fused is None:
            return [name]
        (whole, part) = fused
        return [name.replace(f".{part}.", f".{other}.") for other in whole.parts]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape here of a parameter of a block."""
        (_, _, in_layer) = name.split(".", 2)
        return PARAMS[in_layer].shape(self.sizes)

    def has_columns_first(self, name: str) -> bool:
        """Return whether a matrix is (inputs, outputs) in the folder."""
        has_columns_first = names_of(self.model_type).has_columns_first and name.startswith(
            "layers."
        )
        return has_columns_first and len(self._shape(name)) == 2

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the folder's tensor that holds a parameter of this shape."""
        parts = self.parts(name)
        if len(parts) > 1:
            shape = (sum(self._shape(part)[0] for part in parts), *shape[1:])
        return shape[::-1] if self.has_columns_first(name) else shape

    def is_of_predictor(self, their_name: str) -> bool:
        """Return whether a tensor in the folder belongs to a layer that predicts further tokens and
        that the model does not have.
        """
        layer = their_name.removeprefix(LAYER).partition(".")[0]
        if not their_name.startswith(LAYER) or not layer.isdecimal():
            return False
        return (
            self.sizes.all_layers.stop <= int(layer) < self.sizes.num_layers + self.num_predictors
        )

    @property
    def copies(self) -> dict[str, str]:
        """Copies of the tables that the folder has in each layer that predicts further tokens, with
        the names here of what they copy.
        """
        head = "embed.weight" if self.sizes.tie_embeddings else "head.weight"
        copied = {"embed_tokens.weight": "embed.weight", "shared_head.head.weight": head}
        return {
            f"{LAYER}{layer}.{theirs}": ours
            for layer in self.sizes.predicting_layers
            for theirs, ours in copied.items()
        }


def layout_of_export(sizes: ModelSizes) -> FileLayout:
    """Return the layout in which a model is exported. Raises InputError if no model type computes
    it.
    """
    return FileLayout(sizes, choose_model_type(sizes), sizes.latent is not None, sizes.num_depths)


def _stored_row(row: int, num_still: int, num_turned: int) -> int:
    """Return the number of a row in the folder. In each group of rows `num_still` are not affected
    by RoPE, and then `num_turned` are.
    """
    group, place = divmod(row, num_still + num_turned)
    if place < num_still:
        return row
    half, pair = divmod(place - num_still, num_turned // 2)
    return group * (num_still + num_turned) + num_still + 2 * pair + half
