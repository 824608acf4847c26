"""The config of a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from async_rl.config.algorithm import AlgorithmConfig, CriticConfig
from async_rl.config.base import LONGEST_S, MOST, MOST_PROCESSES, SHORTEST_S, StrictModel
from async_rl.config.evaluation import EvaluationConfig
from async_rl.config.rollout import DataConfig, EnvironmentConfig, RewardConfig, RolloutConfig
from async_rl.config.trainer import CheckpointConfig, StalenessConfig, TrainerConfig, ValidationConfig, WeightsConfig
from protocol.tls import TlsFiles


class ModelConfig(StrictModel):
    """The policy."""

    path: Path = Field(strict=False)
    """Directory of a Hugging Face causal LM with its tokenizer (config.json, safetensors, tokenizer.json)."""


class RedisConfig(StrictModel):
    """The queue between the roles."""

    url: str = "embedded"
    """`embedded` (a server of our own in the run directory, unix socket), or a redis://, rediss:// or unix:// address.
    With a password or an ACL user (`rediss://user:password@host:6379/0`), set it by the environment: ASYNC_RL_REDIS__URL."""
    max_message_bytes: int = Field(256 * 2**20, ge=1024, le=512 * 2**20)
    """Largest message; a larger one is refused where it is made."""
    appendfsync: Literal["always", "everysec"] = "always"
    """Durability of the embedded server."""
    timeout_s: float = Field(5.0, ge=SHORTEST_S, le=LONGEST_S)
    """Longest wait for one answer of the server."""
    retry_s: float = Field(60.0, ge=SHORTEST_S, le=LONGEST_S)
    """How long a role keeps trying to reach a lost server."""
    lease_s: float = Field(15.0, ge=0.5, le=LONGEST_S)
    """A worker that did not renew its lease for this long loses its work to others."""
    progress_timeout_s: float = Field(600.0, ge=SHORTEST_S, le=LONGEST_S)
    """A lease is renewed only while work makes progress: between two decoded tokens of an engine, or two micro-batches of a
    trainer, no more than this may pass. A process that stands still for redis.lease_s longer ends itself. Leave time for the
    slowest single one, compilation included."""
    max_deliveries: int = Field(3, ge=1, le=1000)
    """An entry that was delivered this often without success goes to the dead stream."""
    ca_file: Path | None = Field(None, strict=False)
    """PEM file with the authority that signed the server's certificate (rediss://); default: the system's authorities."""
    cert_file: Path | None = Field(None, strict=False)
    """PEM file with this side's own certificate, if the server asks for one (rediss://)."""
    key_file: Path | None = Field(None, strict=False)
    """PEM file with the key of redis.cert_file."""

    @property
    def tls(self) -> TlsFiles:
        """The three files, as the client takes them."""
        return TlsFiles(self.ca_file, self.cert_file, self.key_file)


class LaunchConfig(StrictModel):
    """How `async-rl run` and `async-rl demo` keep the roles of a run alive on this machine."""

    max_restarts: int = Field(10, ge=0, le=MOST)
    """Restarts of one role, or of the embedded server, within launch.restart_window_s. One failure more ends the run (of a
    rollout or reward worker: that worker). With 0 the first failure does."""
    restart_window_s: float = Field(600.0, ge=SHORTEST_S, le=LONGEST_S)
    """Failures older than this are forgiven."""
    backoff_s: float = Field(0.5, ge=SHORTEST_S, le=LONGEST_S)
    """Wait before the first restart of a role. It doubles with every further failure, until a start lives for longer than
    launch.max_backoff_s."""
    max_backoff_s: float = Field(30.0, ge=SHORTEST_S, le=LONGEST_S)
    """Longest wait before a restart."""
    min_healthy_workers: int = Field(1, ge=0, le=MOST_PROCESSES)
    """Rollout workers that must hold a lease, wherever they were started; at most rollout.workers of them are asked for."""
    min_healthy_grace_s: float = Field(300.0, ge=SHORTEST_S, le=LONGEST_S)
    """Fewer for longer than this end the run; for longer than this and launch.start_timeout_s while one of them starts, which
    takes a while with vLLM."""
    hang_leases: float = Field(8.0, ge=0, le=1e6)
    """A role that lives and renewed no lease for this many times redis.lease_s hangs: it is killed and started again.
    0: never."""
    start_timeout_s: float = Field(600.0, ge=SHORTEST_S, le=LONGEST_S)
    """The same for a role that got no lease since it was started; time to load a model."""
    drain_s: float = Field(20.0, ge=SHORTEST_S, le=LONGEST_S)
    """Time that a rollout or reward worker has, from SIGTERM or SIGUSR1 on, to finish and publish what it holds. What it cannot
    finish goes to others."""
    stop_s: float = Field(60.0, ge=SHORTEST_S, le=LONGEST_S)
    """Time that the roles have to end when the run is stopped; the trainer writes a checkpoint in it. Then they are killed."""


class LoggingConfig(StrictModel):
    """What the roles say."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written to the run directory and the console."""


class RunConfig(StrictModel):
    """Everything about a run. Written, resolved, to config.toml in the run directory."""

    run_dir: Path = Field(Path("runs/default"), strict=False)
    """Directory of everything the run writes."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the run: prompt order, sampling, initial states."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    staleness: StalenessConfig = StalenessConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    redis: RedisConfig = RedisConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: LoggingConfig = LoggingConfig()
