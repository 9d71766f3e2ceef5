"""How a folder names and arranges the tensors of a model. No torch here.

In both layouts a matrix is (outputs, inputs). RoPE rotates the pairs (e, e + P) of a head here, where
P is half the size of the part that turns, and in all model types except one. The files of
deepseek_v3 have the two of a pair next to each other, (2 e, 2 e + 1), so the rows that RoPE turns
are in another order there: in the projection of the queries those of each head, and in kv_a_proj
the last ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from inner.expert_names import router_bias_name
from inner.huggingface.mixtures import has_biases
from inner.huggingface.model_types import choose_model_type
from inner.huggingface.names import huggingface_name
from inner.model.sizes import ModelSizes
from inner.param_spec import ParamSpec

LAYER = "model.layers."


@dataclass(frozen=True)
class FileLayout:
    """Names and order of a model's tensors in a folder."""

    sizes: ModelSizes
    model_type: str
    is_interleaved: bool = False
    """Whether the pairs that RoPE rotates in latent attention are next to each other."""
    num_predictors: int = 0
    """Number of layers in the folder, behind the model's own, that predict further tokens. The model
    has the first of them, one for each of its extra depths."""

    @cached_property
    def biases(self) -> tuple[ParamSpec, ...]:
        """The routers' biases in the folder. They are no parameters, but saved with them."""
        if self.sizes.experts is None or not has_biases(self.model_type):
            return ()
        shape = (self.sizes.experts.number,)
        return tuple(ParamSpec(router_bias_name(layer), shape) for layer in self.sizes.expert_layers)

    def name(self, name: str) -> str:
        """Return the name of a tensor in the folder, given its full name here."""
        return huggingface_name(name, self.model_type)

    def rows(self, name: str, rows: Sequence[int]) -> list[int] | None:
        """Return for some of a parameter's rows the number that each has in the folder; None if the
        order is the same.
        """
        latent = self.sizes.latent
        if latent is None or not self.is_interleaved:
            return None
        if name.endswith(("attention.q_proj.weight", "attention.q_b_proj.weight")):
            return [_stored_row(row, latent.nope_dim, latent.rope_dim) for row in rows]
        if name.endswith("attention.kv_a_proj.weight"):
            return [_stored_row(row, latent.kv_rank, latent.rope_dim) for row in rows]
        return None

    def is_of_predictor(self, their_name: str) -> bool:
        """Return whether a tensor in the folder belongs to a layer that predicts further tokens and that
        the model does not have.
        """
        layer = their_name.removeprefix(LAYER).partition(".")[0]
        if not their_name.startswith(LAYER) or not layer.isdecimal():
            return False
        return self.sizes.all_layers.stop <= int(layer) < self.sizes.num_layers + self.num_predictors

    @property
    def copies(self) -> dict[str, str]:
        """Copies of the tables that the folder has in each layer that predicts further tokens, with the
        names here of what they copy.
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
