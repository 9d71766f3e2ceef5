"""The part of a config that each island decides for itself: `island`, and what `islands` changes of it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from inner.config import MeshConfig, ParallelConfig, ProfileConfig, Section, ShardsConfig
from inner.files import home_path
from outer.config import MAX_TLS_STREAMS
from outer.network.endpoints import ISLAND_NAME


class CheckpointConfig(Section):
    """When and where an island saves the state that it needs to continue after a stop."""

    every_rounds: int | None = Field(default=10, ge=1)
    """Averagings of every parameter between checkpoints. null saves none. Besides, an island without a checkpoint saves
    after its first commit, and every island at the end of the run."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep; older ones are deleted. With 1 the one before stays as well, until the next save:
    the newest is not known to be good before a loss was finite after it."""
    folder: str | None = None
    """Folder of the checkpoints, which all ranks of the island must see. null is `checkpoints` in the island's
    folder."""
    mirror: str | None = None
    """A URL that fsspec supports (s3://bucket/run) or a folder on another disk, to which each checkpoint is copied. An
    island resumes from the copy if its own folder has no checkpoint as new."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest complete checkpoint in the folder, if there is one."""
    accept_unsigned: bool = False
    """Resume also from a checkpoint that is not signed with island.run_key_file, for example from before there was a
    key. Whoever could write it decides what the island goes on with."""


class IslandConfig(Section):
    """The part of the config that is local to one island."""

    name: str | None = Field(default=None, pattern=f"^{ISLAND_NAME}$")
    """Name of the island in the run, which no other island may have. null is `island-<index>`."""
    index: int = Field(default=0, ge=0)
    """Number of this island in the file, from 0: which entry of `islands` it takes."""
    ranks: int = Field(default=1, ge=1)
    """Number of processes of this island, on all of its nodes together."""
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    micro_batch: int = Field(default=8, ge=1)
    """Number of sequences in one forward pass on one rank."""
    auto: tuple[Literal["micro_batch", "recompute", "mesh"], ...] = ()
    """What the island chooses itself when it first starts, by its ranks' memory and measured speed, in place of
    micro_batch, parallel.recompute and mesh (dp_shard and tp). It changes results by rounding only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks compute on. auto is CUDA if this machine has a GPU for each of the island's ranks on it, else the
    CPU. Islands of one rank that are started together share GPUs if there are too few."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype in which the model computes. auto is bfloat16 on GPUs that have it, else float32. Weights, gradients and
    their sums stay in fp32."""
    matmul_precision: Literal["highest", "high"] = "high"
    """CUDA only: `high` multiplies fp32 matrices with TF32's mantissas of 10 bits, several times as fast; `highest`
    with all 23 bits."""
    bootstrap: tuple[str, ...] = ()
    """Addresses of the swarm that `diloco bootstrap` has printed."""
    listen_host: str = "127.0.0.1"
    """Address on which this island listens for other islands; 0.0.0.0 or :: for all of the machine's."""
    listen_port: int = Field(default=0, ge=0, le=65535)
    """First port on which this island listens; 0 lets the system choose. Over tls a rank has two ports, and the next
    rank the next two."""
    dht_port: int = Field(default=0, ge=0, le=65535)
    """tls only, with `bootstrap` addresses of a DHT: port of this island's node of the DHT; 0 lets the system choose,
    and with announce_host the node then only asks the others."""
    announce_host: str | None = None
    """Address at which other islands reach this one, if it differs from listen_host (NAT, cloud)."""
    link_mbit: float | None = Field(default=None, ge=0.001)
    """Rate of this island's link to the others in Mbit/s, the slower of its directions. Islands with slow links reduce
    fewer parts, if all islands give theirs."""
    run_key_file: str | None = None
    """A file with the run key, the same on every island. Peers without the key cannot join or send messages."""
    allow: tuple[str, ...] = ()
    """Public keys of the islands that may take part (`diloco key` prints them), with hivemind also libp2p peer ids.
    Empty allows all."""
    operators: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()
    """Public keys of those who may tell this island over the network to save, stop, or exclude an island
    (`diloco watch ADDRESS --control KEY`)."""
    relay: Literal["off", "client", "server"] = "off"
    """hivemind behind a NAT: a `client` is reached through relays and hole punching, a `server` relays for others."""
    gloo_in_public: bool = False
    """gloo only: listen on an address of the open internet, where whoever reaches gloo's ports can end the island."""
    tls_streams: int = Field(default=1, ge=1, le=MAX_TLS_STREAMS)
    """tls only: connections on which each rank sends to each rank of another island. With a long round trip, a link
    needs about one for each 4 MB of rate x round trip: 6 at 1 Gbit/s and 200 ms."""
    relays: tuple[str, ...] = ()
    """tls only: relays (host:port, as `diloco relay` prints them) by which others reach this island, besides
    announce_host, if that or a listen_host beyond loopback is given."""
    proxy: str | None = None
    """tls only: http://HOST:PORT or socks5://HOST:PORT, a proxy through which this island dials all that it dials."""
    faults: tuple[str, ...] = ()
    """Faults that this island injects into itself, in the syntax of `diloco simulate --fault`; for tests."""
    allow_imports: tuple[str, ...] = ()
    """Import paths, modules or packages that a swarm's config may name when this island joins it (`diloco join`)."""
    joins: bool = False
    """Take the state from a running run and never start one."""
    run_dir: str = "runs"
    """Folder of the folders of runs: records, logbook and checkpoints are in run_dir/NAME."""
    cache_dir: str = "~/.cache/diloco"
    """Folder of the tokenised text, which several runs and islands share."""
    shards: ShardsConfig = ShardsConfig()
    data_paths: tuple[str, ...] | None = None
    """Replaces data.paths on this island, or data.dataset by the one folder where this island has the dataset."""
    mixture_paths: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Replaces the paths of the sources of data.mixture on this island, by the names of the sources."""
    tokenizer: str | None = None
    """Replaces data.tokenizer on this island: the path where it has the same tokenizer.json."""
    init_from: str | None = None
    """Replaces model.init_from on this island: the folder where it has the same weights."""
    connect_seconds: float = Field(default=30.0, gt=0)
    """Longest time for one try to connect to the swarm."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog_seconds: float | None = Field(default=None, gt=0)
    """Time limit of an inner step or evaluation, after which the island ends. The first ones have a limit of their
    own. null derives the limit from measured times."""
    max_hours: float | None = Field(default=None, gt=0)
    """The island leaves after the last round that fits into this time since its start, which restarts of its
    ranks do not change."""
    profile: ProfileConfig = ProfileConfig()
    tensorboard: bool = False
    """Whether the island also writes event files for TensorBoard, into `tensorboard` in its folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether the island also logs to Weights & Biases: into files of its folder (offline), or to its server
    (online)."""

    @field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, value: Any) -> Any:
        """Refuse one GPU by its number: each rank gets one of those that are visible."""
        if isinstance(value, str) and value.startswith("cuda:"):
            number = value.removeprefix("cuda:")
            raise ValueError(f"'auto', 'cpu' or 'cuda'; to choose a GPU, start it with CUDA_VISIBLE_DEVICES={number}")
        return value

    @property
    def label(self) -> str:
        """The name of the island in the run: `name`, or else `island-<index>`."""
        return self.name or f"island-{self.index}"

    @property
    def runs(self) -> Path:
        """The folder `run_dir`. Raises InputError if it is in a home directory and there is none."""
        return home_path(self.run_dir, "island.run_dir")

    def folder(self, run: str) -> Path:
        """Where the island keeps what is its own of the run of this name. Raises InputError as `runs`."""
        return self.runs / run / self.label

    @property
    def cache(self) -> Path:
        """The folder `cache_dir`. Raises InputError as `runs`."""
        return home_path(self.cache_dir, "island.cache_dir")

    def resolve_compute_dtype(self, device: str) -> Literal["float32", "bfloat16"]:
        """The dtype in which the model computes on `device`, for example `cpu`, `cuda` or `cuda:3`."""
        if self.compute_dtype != "auto":
            return self.compute_dtype
        return "bfloat16" if device.startswith("cuda") else "float32"
