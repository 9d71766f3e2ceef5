"""`diloco.Islands`: one model trained by many islands, in your own training loop.

    islands = diloco.Islands("run.yaml", model, optimizer)     # begins the run, or takes the other
                                                               islands' state
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

from diloco.config.check import check_entry
from diloco.errors import ConfigError
from diloco.faults.self_inflicted import slow_down
from diloco.island_rounds.of_all import IslandRounds
from diloco.own_loop.model.buffers import OwnBuffers
from diloco.own_loop.model.island_model import IslandModel
from diloco.own_loop.model.masters import Masters
from diloco.own_loop.model.optimizers import Optimizers
from diloco.own_loop.model.params import Model
from diloco.own_loop.model.ranks import count_step, find_ranks, on_every_rank
from diloco.own_loop.network_watch import NetworkWatch
from diloco.own_loop.own_data import OwnData, open_data
from diloco.own_loop.records import LoopEvents, build_rounds
from diloco.own_loop.run_config import OwnLoopConfig, read_config
from diloco.own_loop.saved_state import (
    SavedState,
    check_same_save,
    load_state,
    state_path,
    write_state,
)
from diloco.participation import open_participation
from diloco.records.kept_config import keep_config, replace_config
from diloco.status.visitors import Equipment
from outer.loop import OuterLoop
from outer.report import RoundReport


class Islands:
    """This process's side of an island. Every rank of the island must create it and call its
    methods in the same order.

    Parameters that require gradients are averaged between islands, and the buffers that `buffers`
    names. Other buffers and frozen parameters are not changed, so they must be the same everywhere.
    Begin from the same parameters on every island.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        model: Model,
        optimizer: Optimizers = None,
        overrides: Sequence[str] = (),
        *,
        state: Mapping[str, Any] | str | Path | None = None,
        params: Masters | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        """Enter the run. Blocks until the run's first islands are here, or until this island has
        taken another one's state.

        `config`: a YAML file, or a dict with the same content (`outer`, `island`, `name`, `seed`).
        `model`: the module, or a list of the parts that this rank holds. `overrides` are
        `section.key=value`. `optimizer` is only needed for `outer.moments`, and for recording the
        learning rate. `state`: the result of `state_dict` on this rank, or a folder of `save`; load
        the model's own state first. `params`: fp32 masters of parameters that are not fp32.
        `buffers`: "mean" or "donor" by the name of a buffer or a pattern (docs/library.md). Raises
        ConfigError, InputError or OuterError.
        """
        read = read_config(config, overrides)
        check_entry(read.run, read.island)
        ranks = find_ranks()
        saved = on_every_rank(ranks, lambda: load_state(state, ranks))
        check_same_save(saved, ranks)
        self._model = IslandModel(
            ranks, model, optimizer, params, read.model_rules(saved, ranks.num_ranks)
        )
        self._buffers = OwnBuffers(ranks, model, buffers)
        self._ranks = ranks
        description = self._model.description + self._buffers.text
        self.config: OwnLoopConfig = read.with_model(
            description, ranks.num_ranks, self._model.names
        )
        self._has_unit = False
        with ExitStack() as stack:
            self._data = open_data(self.config, stack)
            self._open(stack)
            self._begin(saved)
            self._resources = stack.pop_all()
        # A process that ends announces it, so that the other islands need not detect it.
        atexit.register(self.close)
        self._stepped_at = time.monotonic()

    # -- training ----------------------------------------------------------------------------------

    def step(self, tokens: int, loss: float | torch.Tensor | None = None) -> RoundReport | None:
        """Count one optimizer step, and launch and land rounds when they are due. Call it after
        `optimizer.step`.

        `tokens`: number of tokens in this rank's batches of the step; the sum over all ranks is
        used. If several ranks compute on the same text (tensor or context parallel), give the
        number on one of them and 0 on the others. `loss` is recorded: that of the first rank that
        gives one, so of a pipeline's ranks the last stage's. Returns the report of a round that has
        landed; the model then continues from the global params. Raises OuterError if the run cannot
        continue, and ConfigError in a round if the model's parameters have been replaced.
        """
        if self.is_over:
            raise RuntimeError(
                "the island's run is over: leave the loop when islands.is_over is True"
            )
        self._network.require()
        if self._data is not None:
            self._data.require_use()
        seconds = time.monotonic() - self._stepped_at
        self._slow_down(seconds)
        tokens, loss = count_step(self._ranks, tokens, loss, self.config.tokens_per_step)
        if not self._has_unit:
            self._outer.cursor.next_unit()
        self._has_unit = False
        self._outer.pace.observe_step(time.monotonic() - self._stepped_at)
        sources = {} if self._data is None else self._data.take_sources()
        self._events.write_step(
            self._rounds.inner_step + 1, tokens, seconds, self._model.lr, loss, sources
        )
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
        """Number of the round for which inner steps are made."""
        return self._outer.round

    @property
    def steps(self) -> int:
        """Number of inner steps that the whole run has made so far. Schedules follow it, even after
        an absence.
        """
        return self._rounds.inner_step

    @property
    def is_settled(self) -> bool:
        """Whether `state_dict` would leave the model unchanged: no round is in flight or prepared
        by a quorum.
        """
        return self._rounds.is_settled

    @property
    def stage(self) -> int:
        """Index, from 0, of the config's stage to which the next step belongs. A loop sets its
        learning rate by it.
        """
        return 0 if self._data is None else self._data.stage

    @property
    def digest(self) -> str:
        """Digest of the committed parameters and outer momentum. It is equal on all islands of the
        run.
        """
        return self._outer.digest

    def units(self) -> Iterator[int]:
        """Yield the units of data that this island may train on, one for each step, until the run
        is over.

        A unit is the number of one step's data of one island. No two islands get the same unit, but
        the units of a lost island are given to other islands. Take the next unit only after `step`.
        """
        while not self.is_over:
            self._rounds.go_on()
            if not self._has_unit:
                if self._data is not None:
                    self._data.batches.expect(self._outer.cursor.coming)
                self.unit_number = self._outer.cursor.num_own
                """Number of units that the island had read before this one, if the text is its
                own."""
                self._unit = self._outer.cursor.next_unit()
                self._has_unit = True
            yield self._unit

    @contextmanager
    def global_params(self) -> Iterator[None]:
        """Put the global params into the model inside the block, for evaluation. A round in flight
        lands first.
        """
        self._require_between_steps("global_params")
        if isinstance(self._rounds, IslandRounds):
            self._rounds.land_now()
        with self._outer.global_params():
            yield

    @property
    def place(self) -> tuple[int, int]:
        """Index of this rank in the island, and number of its ranks."""
        return self._ranks.rank, self._ranks.num_ranks

    def use_data(self) -> OwnData:
        """Return the text of the config, for `diloco.data`. Raises ConfigError if the config names
        none.
        """
        if self._data is None:
            raise ConfigError(
                "diloco.data: the config has no `data`; give `data` (source, seq_len, ...) and "
                "optimizer.tokens_per_step, the tokens of one step of an island"
            )
        self._data.is_used = True
        return self._data

    # -- saving and leaving ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the outer loop. Save it beside the states of the model and
        the optimizer.

        Torch can load it with `weights_only=True`. A round in flight lands first. With
        `outer.wait_for: quorum` the island first contributes to a round. Call it after `step` and
        before taking the next unit.
        """
        self._require_between_steps("state_dict")
        self._rounds.land_now()
        tensors, facts = self._outer.save()
        hash_and_ranks = self.config.run.hash, self._ranks.num_ranks
        return SavedState(facts, tensors, self._rounds.resume_point, *hash_and_ranks).to_dict()

    def save(self, folder: str | Path) -> None:
        """Write `state_dict` of every rank into a folder, a file per rank, for `state=folder`.

        Every rank must call it, at the times of `state_dict`. It returns when all files are
        written.
        """
        write_state(self.state_dict(), state_path(Path(folder), self._ranks.rank))
        self._ranks.gather(None)

    def leave(self) -> None:
        """Announce that the island leaves the run, and free the network. Further calls do
        nothing.
        """
        self.close("the loop leaves")

    def close(self, why: str = "the loop has ended") -> None:
        """Leave the run like `leave`. It is called at the end of a `with` block and of the
        process.
        """
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close("the loop has ended" if error is None else f"{type(error).__name__} in the loop")

    # -- inside ------------------------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        """Open records and connections, and build the outer loop."""
        run = self.config.run
        island = self.config.island
        ranks = self._ranks
        folder = island.folder(run.name)
        if ranks.is_leader:
            keep_config(folder.parent, run)
        corpus = None if self._data is None else self._data.corpus
        opening = open_participation(
            run,
            island,
            ranks,
            folder,
            self._buffers.beside(self._model.params),
            Equipment("its own loop", self._model.device),
            moments=self._model.moments,
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
        """Enter the run. Continue inside a round if the saved state is still the state of the
        run.
        """
        outer = self._outer
        self._is_closed = False
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
        """Raise RuntimeError between taking a unit and its step: the unit would count as trained
        although it is not.
        """
        if self._has_unit:
            raise RuntimeError(
                f"{what}: a unit of data was taken and its step is not counted yet; call it after "
                "islands.step"
            )

    def _check_params(self) -> None:
        """Leave the run and raise ConfigError if the model no longer has the averaged
        parameters.
        """
        try:
            self._model.require_same(self.round)
        except ConfigError:
            self.close("the model's parameters have changed")
            raise
        if self._ranks.is_leader:
            self._buffers.watch.warn_of_changes()

    def _finish(self) -> None:
        """Leave after the run's last round, or because the operator has requested it."""
        outer = self._outer
        if cause := self._rounds.stopped:
            outer.leave()
            self._participation.event("left", f"{cause}; {outer.position.round} rounds are done")
        else:
            outer.finish()
            self._participation.event(
                "left", f"the run's {self.config.run.outer.rounds} rounds are done"
            )
        self.close()
