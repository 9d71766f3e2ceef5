"""`diloco.Islands`: one model trained by many islands, in a training loop of one's own.

    islands = diloco.Islands("run.yaml", model, optimizer)     # begins the run, or takes the state of the others
    for batch in loader:
        loss = model(batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()
        islands.step(tokens=batch.num_tokens)                  # counts; launches and lands rounds
        if islands.is_over:
            break

All ranks of torch.distributed are one island; without it the process is an island of one rank.
"""

import atexit
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from diloco.config.check import check_entry
from diloco.errors import ConfigError
from diloco.faults.self_inflicted import slow_down
from diloco.island_rounds.of_all import IslandRounds
from diloco.own_loop.model.copies import check_ranks
from diloco.own_loop.model.optimizers import Optimizers, as_list, with_moments
from diloco.own_loop.model.params import trained_params
from diloco.own_loop.model.ranks import count_tokens, find_ranks
from diloco.own_loop.model.watch import ParamsWatch
from diloco.own_loop.network_watch import NetworkWatch
from diloco.own_loop.own_data import OwnData, open_data
from diloco.own_loop.records import LoopEvents, build_rounds
from diloco.own_loop.run_config import OwnLoopConfig, read_config
from diloco.own_loop.saved_state import SavedState, parse_state
from diloco.participation import Place, open_participation
from diloco.records.kept_config import keep_config, replace_config
from outer.loop import OuterLoop
from outer.report import RoundReport


class Islands:
    """This process's side of an island. Every rank of the island makes it and calls each method, in the same order.

    Parameters that require gradients are averaged between islands; buffers and frozen parameters stay as they are, so
    they must be the same everywhere. Begin from the same parameters on every island.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        model: nn.Module,
        optimizer: Optimizers = None,
        overrides: Sequence[str] = (),
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Enter the run. Blocks until the other islands of its start are there, or this one has taken their state.

        `config`: a YAML file or the same as a dict, with `outer`, `island`, `name`, `seed`; `overrides` are
        `section.key=value`. `optimizer` is needed for `outer.moments` only, and gives the recorded learning rate.
        `state` is what `state_dict` returned on this rank; load the model's own state first. Raises ConfigError,
        InputError or OuterError.
        """
        read = read_config(config, overrides)
        check_entry(read.run, read.island)
        params, self._watch = trained_params(model), ParamsWatch(model)
        self._device = str(next(model.parameters()).device)
        self._ranks = find_ranks()
        self.config: OwnLoopConfig = read.with_model(check_ranks(self._ranks, params), self._ranks.num_ranks)
        self._optimizers = as_list(optimizer)
        self._moments = None if self.config.run.outer.moments is None else with_moments(params, optimizer)
        self._params = self._moments or params
        self._has_unit = False
        with ExitStack() as stack:
            self._data = open_data(self.config, stack)
            self._open(stack)
            self._begin(None if state is None else parse_state(state))
            self._resources = stack.pop_all()
        # A process that ends says goodbye, so that the others need not find out.
        atexit.register(self.close)
        self._stepped_at = time.monotonic()

    # -- training ---------------------------------------------------------------------------------------------

    def step(self, tokens: int, loss: float | torch.Tensor | None = None) -> RoundReport | None:
        """Count one optimizer step, and launch and land rounds when they are due. Call it after `optimizer.step`.

        `tokens`: those of this rank's batches in the step; those of all ranks are added up. Ranks that compute on the
        same text together (tensor, context parallel) give it on one of them and 0 on the others. `loss` is recorded.
        Returns the report of a round that has landed, after which the model continues from the global parameters.
        Raises OuterError when the run cannot go on, and ConfigError in a round if the model has got other parameters.
        """
        if self.is_over:
            raise RuntimeError("the island's run is over: leave the loop when islands.is_over")
        self._network.require()
        if self._data is not None:
            self._data.require_use()
        seconds = time.monotonic() - self._stepped_at
        self._slow_down(seconds)
        tokens = count_tokens(self._ranks, tokens, self.config.tokens_per_step)
        if not self._has_unit:
            self._outer.cursor.next_unit()
        self._has_unit = False
        self._outer.pace.observe_step(time.monotonic() - self._stepped_at)
        lr = self._optimizers[0].param_groups[0]["lr"] if self._optimizers else 0.0
        loss = loss.item() if isinstance(loss, torch.Tensor) else loss
        sources = {} if self._data is None else self._data.take_sources()
        self._events.write_step(self._rounds.inner_step + 1, tokens, seconds, float(lr), loss, sources)
        self._events.landed_report = None
        self._rounds.step(tokens)
        if self._rounds.is_over:
            self._finish()
        self._stepped_at = time.monotonic()
        return self._events.landed_report

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is committed, or this island has left."""
        return self._rounds.is_over or self._is_closed

    @property
    def round(self) -> int:
        """The round that inner steps are made for."""
        return self._outer.round

    @property
    def steps(self) -> int:
        """Inner steps of the whole run before the next one: where schedules are, also of an island that comes back."""
        return self._rounds.inner_step

    @property
    def is_settled(self) -> bool:
        """Whether `state_dict` would leave the model as it is: no round is in flight, or prepared by a quorum."""
        return self._rounds.is_settled

    @property
    def stage(self) -> int:
        """Which of the `stages` of the config the next step is of, from 0. A loop sets its learning rate by it."""
        return 0 if self._data is None else self._data.stage

    @property
    def digest(self) -> str:
        """Digest of the committed parameters and outer momentum, equal on all islands of the run."""
        return self._outer.digest

    def units(self) -> Iterator[int]:
        """The units of data that this island may train on, one for each step, until the run is over.

        A unit is the number of one step's data of one island: no two islands get the same, and one whose island was
        lost is given to another. Draw the next only after `step`.
        """
        while not self.is_over:
            self._rounds.go_on()
            if not self._has_unit:
                if self._data is not None:
                    self._data.batches.expect(self._outer.cursor.coming)
                self.unit_number = self._outer.cursor.num_own
                """How many units the island had read before this one, where it has data of its own."""
                self._unit, self._has_unit = self._outer.cursor.next_unit(), True
            yield self._unit

    @contextmanager
    def global_params(self) -> Iterator[None]:
        """The model holds the global parameters inside the block, for evaluation. A round in flight lands before."""
        self._require_between_steps("global_params")
        if isinstance(self._rounds, IslandRounds):
            self._rounds.land_now()
        with self._outer.global_params():
            yield

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank in the island, and how many there are."""
        return self._ranks.rank, self._ranks.num_ranks

    def use_data(self) -> OwnData:
        """The text of the config, for `diloco.data`. Raises ConfigError if the config names none."""
        if self._data is None:
            raise ConfigError(
                "diloco.data: the config has no `data`; give `data` (source, seq_len, ...) and "
                "optimizer.tokens_per_step, the tokens of one step of an island"
            )
        self._data.is_used = True
        return self._data

    # -- saving and leaving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state of the outer loop, to be saved beside the model's and the optimizer's.

        Torch can load it with `weights_only=True`. A round in flight lands before; with `outer.wait_for: quorum` the
        island contributes. Call it after `step` and before the next unit is drawn.
        """
        self._require_between_steps("state_dict")
        self._rounds.land_now()
        tensors, facts = self._outer.save()
        return SavedState(facts, tensors, self._rounds.resume_point, self.config.run.hash).to_dict()

    def leave(self) -> None:
        """Leave the run after saying goodbye, and free the network. Idempotent."""
        self.close("the loop leaves")

    def close(self, why: str = "the loop has ended") -> None:
        """As `leave`. It is called at the end of a `with` block and of the process."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if not self._rounds.is_over:
            self._outer.leave()
            self._events.note_leave(why, self.config.run.outer.inner_steps)
        self._resources.close()

    def __enter__(self) -> "Islands":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("the loop has ended" if error is None else f"{type(error).__name__} in the loop")

    # -- inside -----------------------------------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        """Open records and connections, and build the outer loop."""
        run, island, ranks = self.config.run, self.config.island, self._ranks
        folder = island.folder(run.name)
        if ranks.is_leader:
            keep_config(folder.parent, run)
        corpus = None if self._data is None else self._data.corpus
        opening = open_participation(
            run,
            island,
            ranks,
            folder,
            self._params,
            Place("its own loop", self._device),
            moments=self._moments,
            wait_for_corpus=lambda: corpus,
        )
        self._participation = stack.enter_context(opening)
        if ranks.is_leader:
            self._participation.on_entry = partial(replace_config, folder.parent, run)
        self._events = LoopEvents(self._participation, self._data, self._check_params)
        self._slow_down = partial(slow_down, self._participation.hooks)
        self._network = NetworkWatch(self._participation.network, self._participation.event_loop)

    @property
    def _outer(self) -> OuterLoop:
        return self._participation.outer

    def _begin(self, saved: SavedState | None) -> None:
        """Enter the run, and go on inside a round if the saved state is still that of the run."""
        outer, self._is_closed = self._outer, False
        if saved is not None:
            saved.check(self.config.run.hash)
            outer.restore(saved.tensors, saved.facts)
            digest = outer.digest
        outer.begin()
        self._participation.record_entry(outer.position)
        self._rounds = build_rounds(self._participation, self.config.run, self._events)
        if saved is not None and outer.digest == digest:
            self._rounds.resume(saved.point)
        else:
            self._participation.count_moments()
        self._rounds.proceed()

    def _require_between_steps(self, what: str) -> None:
        """Raise RuntimeError between drawing a unit and its step: the unit would count as trained and is not."""
        if self._has_unit:
            raise RuntimeError(f"{what}: a unit of data is drawn and not counted yet; call it after islands.step")

    def _check_params(self) -> None:
        """Leave the run and raise ConfigError if the model has other parameters than those that are averaged."""
        try:
            self._watch.require_same(self._ranks, self.round)
        except ConfigError:
            self.close("the model's parameters have changed")
            raise

    def _finish(self) -> None:
        """The run is over, or the operator has asked this island to leave."""
        outer = self._outer
        if cause := self._rounds.stopped:
            outer.leave()
            self._participation.event("left", f"{cause}; {outer.position.round} rounds are done")
        else:
            outer.finish()
            self._participation.event("left", f"the run's {self.config.run.outer.rounds} rounds are done")
        self.close()
