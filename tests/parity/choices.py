"""The choices of routers on a mesh: recorded by position of the island's batch, and replayed.

Shape suffixes: N positions of a micro-batch on a rank, X experts, J experts per token.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inner.config import ExpertsConfig
from inner.model import router
from inner.model.experts import Mixture, mixtures
from inner.trainer import Trainer
from tests.inner.small import SEQ_LEN, SEQUENCES

Choices = dict[tuple[int, int], Tensor]
"""By (step, layer): the experts that each position chose (SEQUENCES, SEQ_LEN, J), int64; -1 where a
rank did not route.
"""


@dataclass
class ChoiceLog:
    """Records the choices of this rank's routers, and replaces them by those of another run if it
    has some.

    It replaces the function of the router's module that chooses, so the trainer has no part in it.
    A repeated forward does not choose, and is not recorded.
    """

    trainer: Trainer
    replayed: Choices | None = None
    choices: Choices = field(default_factory=dict)
    num_flipped: int = 0
    """Number of choices of positions that would have been others than the replayed ones."""
    step: int | None = None
    """The step in progress; None outside of one."""
    layer: int = -1
    """The layer whose router computes."""
    num_calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of micro-batches of the step that a layer has routed."""

    def __post_init__(self) -> None:
        choose = router.choose
        router.choose = partial(self._choose, choose)
        for mixture in mixtures(self.trainer.model_parts):
            mixture.router.register_forward_pre_hook(partial(self._enter, mixture))

    def begin(self, step: int | None) -> None:
        """Record a step from here on; None: nothing."""
        self.step = step
        self.num_calls.clear()

    def rows_to(self, step: int, layer: int, num_ranks: int) -> list[int]:
        """Return how many of this rank's rows of a step have their expert on each rank of ep."""
        chosen = self.choices[step, layer]
        held = self._num_experts // num_ranks
        return torch.bincount(chosen[chosen >= 0] // held, minlength=num_ranks).tolist()

    def _enter(self, mixture: Mixture, _module: nn.Module, _inputs: Any) -> None:
        self.layer = mixture.layer
        self._num_experts = mixture.config.number

    def _choose(
        self, choose: Callable[..., Tensor], ranks_NX: Tensor, config: ExpertsConfig
    ) -> Tensor:
        chosen_NJ = choose(ranks_NX, config)
        if self.step is None:
            return chosen_NJ
        place = self._place()
        if self.replayed is not None:
            own_NJ = chosen_NJ
            chosen_NJ = self.replayed[self.step, self.layer][place].reshape(own_NJ.shape)
            self.num_flipped += int((own_NJ != chosen_NJ).any(dim=1).sum())
        empty = torch.full((SEQUENCES, SEQ_LEN, config.per_token), -1)
        whole = self.choices.setdefault((self.step, self.layer), empty)
        whole[place] = chosen_NJ.view(whole[place].shape)
        self.num_calls[self.layer] += 1
        return chosen_NJ

    def _place(self) -> tuple[Tensor, Tensor]:
        """Return sequences (B, 1) and positions (1, S) of the micro-batch that the layer routes
        now.
        """
        trainer = self.trainer
        mine = torch.arange(SEQUENCES).chunk(trainer.num_data_ranks)[trainer.data_rank]
        sequences = mine.split(trainer.settings.micro_batch)[self.num_calls[self.layer]]
        tp = trainer.mesh.degrees.tp
        positions = trainer._cutter.positions_S.chunk(tp)[trainer.mesh.at["tp"]]
        return sequences[:, None], positions[None]


def join(everyone: list[Choices]) -> Choices:
    """Return the choices of all ranks together. A position that several ranks route must choose the
    same.
    """
    whole: Choices = {}
    for choices in everyone:
        for key, chosen in choices.items():
            before = whole.setdefault(key, chosen.clone())
            is_both = (before >= 0) & (chosen >= 0)
            assert torch.equal(before[is_both], chosen[is_both]), (
                f"ranks choose differently in step and layer {key}"
            )
            before[chosen >= 0] = chosen[chosen >= 0]
    return whole
