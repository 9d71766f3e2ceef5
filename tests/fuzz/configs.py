"""The config text that a swarm shows to whoever joins it, a group of its own: parsing YAML takes
milliseconds.
"""

from diloco.config.from_swarm import describe_data, parse_swarm_config, swarm_text
from diloco.config.schema import Config
from diloco.errors import ConfigError
from outer.errors import InputError
from outer.membership.records import check_config_text
from tests.fuzz.entries import Entries, Entry

SECONDS = 1.0
"""It is read once, by the command that joins."""
SHORT = (
    b"name: run\nseed: 3\n",
    b"model: {dim: 64, num_layers: 2, rope_scaling: null}\n",
    b"data: {source: huggingface, dataset: owner/name, mixture: [{name: a, weight: 2, source: "
    b"text}]}\n",
    b"outer:\n  inner_steps: 30\n  optimizer: {lr: 0.7}\n  moments: [1, 2]\n  codec: int4\n",
    b"optimizer: {name: adamw, lr: 1.0e-3, betas: [0.9, 0.95], groups: [{pattern: 'a*', lr_scale: "
    b"2}]}\n",
    b"stages: [{tokens: 100, seq_len: 64}]\nevaluate: {every_rounds: 2}\n",
)


def build_configs() -> Entries:
    """The config of a run, whole and in small pieces."""
    whole = swarm_text(Config()).encode()
    return {
        "config": Entry(_parse, [*SHORT, whole], (ConfigError, InputError), most_seconds=SECONDS)
    }


def _parse(raw: bytes) -> None:
    text = raw.decode("utf-8", "replace")
    check_config_text(text)
    run = parse_swarm_config(text)
    assert describe_data(run).isprintable()
    assert parse_swarm_config(swarm_text(run)) == run, (
        "a config is another one once it has been published"
    )
