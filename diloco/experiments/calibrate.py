"""Measure what an inner step and an evaluation cost on one core: python -m
diloco.experiments.calibrate FOLDER

FOLDER/NAME.yaml is the config of a run. For each such file, the program makes a few steps of the
config's first island and writes FOLDER/NAME.json. It is a process of its own because a process can
open torch's process groups only once. It computes on one thread, as runs do.
"""

import json
import sys
import time
from pathlib import Path

from diloco.assemble import build_batches, build_trainer
from diloco.config.schema import Config, load_config
from diloco.experiments.forecast import Cost
from diloco.runtime.corpus import load_corpus
from diloco.runtime.evaluation import evaluate_heldout
from diloco.runtime.process_group import open_process_group, pick_device
from diloco.watchdog.signals import end_with_parent
from inner.files import write_atomically
from inner.trainer import Trainer

WARM_UP_STEPS = 1
TIMED_STEPS = 4


def measure(config: Config) -> Cost:
    """Return the costs of the config's first island, in core-seconds. The process group must be
    open.
    """
    begun = time.process_time()
    run = config.run
    island = config.for_island(0)
    corpus = load_corpus(run, island)
    trainer = build_trainer(run, island, corpus, pick_device(island))
    start = time.process_time() - begun
    batches = build_batches(run, corpus)
    seconds = []
    for number in range(WARM_UP_STEPS + TIMED_STEPS):
        batch = batches.read_step(number, 0, 1, trainer.settings.micro_batch)
        seconds.append(time_step(trainer, batch.micro_batches))
    begun = time.process_time()
    evaluate_heldout(run, trainer, corpus, 0, 0)
    evaluation = time.process_time() - begun
    return Cost(step=min(seconds[WARM_UP_STEPS:]), evaluation=evaluation, start=start)


def time_step(trainer: Trainer, micro_batches: list) -> float:
    """Return the core-seconds of one inner step."""
    begun = time.process_time()
    trainer.step(micro_batches)
    return time.process_time() - begun


def main(folder: Path) -> None:
    """Measure every config of the folder."""
    end_with_parent()
    imported = time.process_time()
    configs = {path: load_config(path) for path in sorted(folder.glob("*.yaml"))}
    island = next(iter(configs.values())).for_island(0)
    with open_process_group(island, pick_device(island)):
        for path, config in configs.items():
            cost = measure(config)
            content = {
                "step": cost.step,
                "evaluation": cost.evaluation,
                "start": cost.start + imported,
            }
            write_atomically(path.with_suffix(".json"), json.dumps(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
