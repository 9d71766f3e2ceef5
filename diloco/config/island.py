"""The part of a config that each island sets for itself: `island`, with the changes in
`islands`.
"""

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
    """Number of averages of every parameter between two checkpoints. null saves none. In addition,
    an island without a checkpoint saves after its first commit, and every island saves at the end
    of the run."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep; older checkpoints are deleted. With 1 the previous checkpoint
    is kept until the next save, too, because the newest is only known to be good after a finite
    loss."""
    folder: str | None = None
    """Folder of the checkpoints, which all ranks of the island must be able to reach. null is
    `checkpoints` in the island's folder."""
    mirror: str | None = None
    """Where each checkpoint is copied to: a URL that fsspec supports (s3://bucket/run), or a folder
    on another disk. An island resumes from the copy if it is newer than the checkpoints in the
    island's own folder."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest complete checkpoint in the folder, if there is one. never: start
    from the beginning."""
    accept_unsigned: bool = False
    """Also resume from a checkpoint that is not signed with island.run_key_file, for example one
    from before the key was introduced. Anybody who can write such a checkpoint can change the
    island's state."""


class AlertsConfig(Section):
    """What the island tells its operator at once, and how. Nothing is told without a command or a
    webhook.
    """

    command: tuple[str, ...] = ()
    """Program and arguments to run for each alert, which it gets as JSON on its standard input. It
    is run without a shell."""
    webhook: str | None = Field(default=None, pattern="^https?://")
    """URL to which each alert is posted as JSON, with its text in `text`."""
    no_commit_minutes: float | None = Field(default=30.0, gt=0)
    """Alert when no round has been committed for this number of minutes. null: never."""
    island_away_minutes: float | None = Field(default=30.0, gt=0)
    """Alert when an island has been in no committed round for this number of minutes. null:
    never.
    """
    disk_share: float | None = Field(default=0.95, gt=0, lt=1)
    """Alert when more than this share of the disk with the island's folder is in use. null:
    never.
    """
    loss_spike: bool = True
    """Alert at each spike of the loss (optimizer.spikes)."""
    disagreement: bool = True
    """Alert when islands have found different states in a round."""

    @property
    def is_on(self) -> bool:
        """Whether alerts are sent at all."""
        return bool(self.command) or self.webhook is not None


class IslandConfig(Section):
    """The part of the config that is local to one island."""

    name: str | None = Field(default=None, pattern=f"^{ISLAND_NAME}$")
    """Name of the island, which must be unique in the run. null is `island-<index>`."""
    index: int = Field(default=0, ge=0)
    """Number of this island in the file, from 0. It selects the island's entry of `islands`."""
    ranks: int = Field(default=1, ge=1)
    """Number of processes of this island, over all of its nodes."""
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    micro_batch: int = Field(default=8, ge=1)
    """Number of sequences in one forward pass on one rank."""
    auto: tuple[Literal["micro_batch", "recompute", "mesh"], ...] = ()
    """Settings that the island chooses itself when it first starts, by the memory and measured
    speed of its ranks: micro_batch, parallel.recompute and mesh (dp_shard and tp). The choice
    changes results by rounding only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device on which the ranks compute. auto is CUDA if this machine has a GPU for each of
    the island's ranks on it, else the CPU. Islands of one rank that are started together share GPUs
    if there are too few."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which the model computes. auto is bfloat16 on GPUs that support it, else float32.
    float16 is for GPUs without bfloat16: losses are scaled, and steps whose gradients are too large
    for it are skipped. Weights, gradients and their sums are always fp32. Islands of a run may
    differ in it.
    """
    matmul_precision: Literal["highest", "high"] = "high"
    """CUDA only. `high`: multiply fp32 matrices with TF32's mantissas of 10 bits, which is several
    times as fast. `highest`: multiply with all 23 bits."""
    bootstrap: tuple[str, ...] = ()
    """Addresses of the swarm, as `diloco bootstrap` prints them."""
    listen_host: str = "127.0.0.1"
    """Address on which this island listens for other islands; 0.0.0.0 or :: for all addresses of
    the machine."""
    listen_port: int = Field(default=0, ge=0, le=65535)
    """First port on which this island listens; 0 lets the system choose. Over tls each rank uses
    two ports, one rank after the other."""
    dht_port: int = Field(default=0, ge=0, le=65535)
    """tls only, if `bootstrap` has addresses of a DHT: port of this island's node of the DHT. 0
    lets the system choose. With 0 and announce_host, the node only sends requests and answers
    none."""
    announce_host: str | None = None
    """Address at which other islands reach this island, if it is not listen_host (NAT, cloud)."""
    link_mbit: float | None = Field(default=None, ge=0.001)
    """Rate of this island's link to the other islands in Mbit/s, in its slower direction. If all
    islands set it, islands with slow links reduce fewer parts."""
    run_key_file: str | None = None
    """File with the run key, which is the same on every island. Peers without the key cannot join
    or send messages."""
    allow: tuple[str, ...] = ()
    """Public keys of the islands that may take part (`diloco key` prints them); with hivemind also
    libp2p peer ids. Empty allows all islands."""
    operators: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()
    """Public keys of operators who may order this island over the network to save, to stop, or to
    exclude an island (`diloco watch ADDRESS --control KEY`)."""
    relay: Literal["off", "client", "server"] = "off"
    """hivemind behind a NAT: a `client` is reached through relays and hole punching, a `server`
    relays for others."""
    gloo_in_public: bool = False
    """gloo only: listen on a public internet address. Anyone who can reach gloo's ports can then
    end the island."""
    tls_streams: int = Field(default=1, ge=1, le=MAX_TLS_STREAMS)
    """tls only: number of connections on which each rank sends to each rank of another island. A
    link with a long round trip needs about one for each 4 MB of rate x round trip: 6 at 1 Gbit/s
    and 200 ms."""
    relays: tuple[str, ...] = ()
    """tls only: relays (host:port, as `diloco relay` prints them) through which other islands reach
    this island. They also use announce_host if it is set, or listen_host if that is not a loopback
    address."""
    proxy: str | None = None
    """tls only: proxy for all outgoing connections of this island, http://HOST:PORT or
    socks5://HOST:PORT."""
    faults: tuple[str, ...] = ()
    """Faults that this island injects into itself, in the syntax of `diloco simulate --fault`; for
    tests."""
    allow_imports: tuple[str, ...] = ()
    """Import paths, modules or packages that a swarm's config may name when this island joins it
    (`diloco join`)."""
    joins: bool = False
    """Take the state from a running run, and never start a new run."""
    run_dir: str = "runs"
    """Folder that holds the folders of runs: records, logbook and checkpoints are in
    run_dir/NAME."""
    cache_dir: str = "~/.cache/diloco"
    """Folder of the tokenised text. Several runs and islands may share it."""
    shards: ShardsConfig = ShardsConfig()
    data_paths: tuple[str, ...] | None = None
    """Replaces data.paths on this island. It may also replace data.dataset by one folder with the
    dataset."""
    mixture_paths: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Replaces the paths of sources of data.mixture on this island, by the names of the sources."""
    tokenizer: str | None = None
    """Replaces data.tokenizer on this island: path of the same tokenizer.json."""
    init_from: str | None = None
    """Replaces model.init_from on this island: folder with the same weights."""
    connect_seconds: float = Field(default=30.0, gt=0)
    """Time limit of one attempt to connect to the swarm."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog_seconds: float | None = Field(default=None, gt=0)
    """Time limit of an inner step or evaluation. The island ends if one takes longer. The first
    steps have a separate limit. null derives the limit from measured times."""
    max_hours: float | None = Field(default=None, gt=0)
    """Time limit in hours since the island's start, which restarts of its ranks do not reset. The
    island leaves after the last round that fits into it."""
    masters: bool = False
    """Your own training loop with `diloco.Islands` only: keep fp32 masters of its bfloat16 and
    float16 parameters, 4 bytes per element."""
    alerts: AlertsConfig = AlertsConfig()
    profile: ProfileConfig = ProfileConfig()
    tensorboard: bool = False
    """Whether the island also writes event files for TensorBoard, into `tensorboard` in its
    folder.
    """
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether the island also logs to Weights & Biases: into files of its folder (offline), or to
    the server of Weights & Biases (online)."""

    @field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, value: Any) -> Any:
        """Refuse the number of a GPU: each rank gets one of the visible GPUs."""
        if isinstance(value, str) and value.startswith("cuda:"):
            number = value.removeprefix("cuda:")
            raise ValueError(
                "'auto', 'cpu' or 'cuda'; to choose a GPU, start it with "
                f"CUDA_VISIBLE_DEVICES={number}"
            )
        return value

    @property
    def label(self) -> str:
        """Name of the island in the run: `name`, or else `island-<index>`."""
        return self.name or f"island-{self.index}"

    @property
    def runs(self) -> Path:
        """The folder `run_dir`. Raises InputError if it is in a home directory and there is
        none.
        """
        return home_path(self.run_dir, "island.run_dir")

    def folder(self, run: str) -> Path:
        """Return the folder for the island's own files of this run. Raises InputError as `runs`
        does.
        """
        return self.runs / run / self.label

    @property
    def cache(self) -> Path:
        """The folder `cache_dir`. Raises InputError as `runs` does."""
        return home_path(self.cache_dir, "island.cache_dir")

    def resolve_compute_dtype(self, device: str) -> Literal["float32", "bfloat16", "float16"]:
        """Return the dtype in which the model computes on `device`, for example `cpu`, `cuda` or
        `cuda:3`.
        """
        if self.compute_dtype != "auto":
            return self.compute_dtype
        return "bfloat16" if device.startswith("cuda") else "float32"
