"""The learner: what the ranks do together. Rank 0 calls; the others follow the same calls, told over the process group.

A command is a name and a packed message (no pickle); every rank then runs the same collective code on the same samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.config.run import RunConfig
from async_rl.errors import AsyncRLError, DeadlineExceeded
from async_rl.logs import Event, get_logger
from async_rl.run_dir.intake_log import Position, newest_epoch
from async_rl.run_dir.layout import RunLayout
from async_rl.trainer.checkpoint import CRITIC, Checkpoint, find_latest, load_checkpoint, open_checkpoint
from async_rl.trainer.checkpoint_writer import CheckpointWriter, WriteRequest
from async_rl.trainer.commands import receive_command, send_command
from async_rl.trainer.compute import ComputeThread
from async_rl.trainer.critic import Critic, CriticStats, MicroBatchTargets
from async_rl.trainer.distributed import Ranks
from async_rl.trainer.intake import ComposedStep
from async_rl.trainer.kept_weights import KeptWeights
from async_rl.trainer.objective import step_settings
from async_rl.trainer.packing import MicroBatch, balance, lay_out, unpack
from async_rl.trainer.policy import CANARY_SEED, PolicyModel, load_head
from async_rl.trainer.progress import Progress, StepResult
from async_rl.trainer.samples import TrainingSample
from async_rl.trainer.schedule import Schedule
from async_rl.trainer.snapshots import Snapshots
from async_rl.trainer.step import OtherLogprobs, StepStats, make_optimizer, policy_logprobs, train_step
from async_rl.trainer.step_credit import StepCredit
from async_rl.trainer.step_metrics import critic_metrics, step_stats_metrics
from async_rl.trainer.watchdog import WAITING_FOR_COMMAND, is_of_collective, stuck
from async_rl.weights.canary import FLOAT32_SLACK
from async_rl.weights.manifest import Canary, Probe, Tolerance
from async_rl.weights.send_buffer import SendBuffer
from protocol.lease import Work

IDLE_EVERY_S = 10.0


class Learner:
    """Policy, critic, optimizers and schedules of one rank. Rank 0's methods involve every rank; the others run `follow`."""

    def __init__(
        self,
        config: RunConfig,
        policy: PolicyModel,
        ranks: Ranks,
        *,
        reference: PolicyModel | None = None,
        critic: Critic | None = None,
    ) -> None:
        """reference: the frozen policy of the KL term; needed with algorithm.kl_coef above 0. critic: needed with gae."""
        self._config = config
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._ranks = ranks
        self._layout = RunLayout(Path(config.run_dir))
        trainer = config.trainer
        self.optimizer = make_optimizer(
            policy, learning_rate=trainer.learning_rate, betas=trainer.betas, weight_decay=trainer.weight_decay
        )
        self._schedule = Schedule.from_config(trainer, trainer.learning_rate)
        self._settings = step_settings(config, on_micro_batch=self._mark_micro_batch)
        self._credit = StepCredit(config, self._call)
        self.work = Work(explain=ranks.report)
        """The command that this rank runs now; progress is marked at every micro-batch."""
        self.thread = ComputeThread()
        """Where rank 0 calls the methods that compute, while its event loop goes on."""
        self._snapshots = Snapshots(config, policy, ranks)
        self._writer = CheckpointWriter(
            self._layout.checkpoints_dir, policy, self.optimizer, critic=critic, timeout_s=trainer.idle_timeout_s
        )
        self._steps_done = 0
        self._batch_version = 0
        self._kept = KeptWeights()
        self._proximal: dict[tuple[str, int], Tensor] = {}
        self._last_command = time.monotonic()
        self._commands: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
            "train": self._do_train,
            "proximal": self._do_proximal,
            "reference": self._do_reference,
            "values": self._do_values,
            "score": self._do_score,
            "gather": self._snapshots.do,
            "save": self._do_save,
            "load": self._do_load,
            "idle": lambda _: None,
        }

    # -- rank 0 ------------------------------------------------------------------------------------------------------
    def restore(self) -> Progress:
        """Load the newest complete checkpoint, if there is one; what had to be passed over is said."""
        found = find_latest(self._layout.checkpoints_dir)
        for skipped in found.skipped:
            get_logger().warning(Event.CHECKPOINT_IGNORED, path=str(skipped.path), reason=skipped.reason)
        if found.latest is None:
            return Progress()
        return self.load(found.latest)

    def load(self, checkpoint: Checkpoint) -> Progress:
        """Load one checkpoint, on every rank."""
        self._call("load", {"path": str(checkpoint.path)})
        return Progress.from_checkpoint(checkpoint)

    def begin_batch(self, batch: Sequence[ComposedStep]) -> None:
        """Fix the proximal policy of a drawn batch: the policy as it is now. The first step's own logprobs are those. Fix the
        critic's values likewise."""
        self._batch_version = batch[0].record.version
        self._proximal.clear()
        self._credit.begin_batch(batch)
        later = self._credit.samples(batch[1:])
        if later and not self._interpolates:
            self._call("proximal", {"samples": later})

    def train(self, step: ComposedStep) -> StepResult:
        """One optimizer step on what the record says."""
        version, credited = step.record.version, self._credit.credited(step)
        targets = credited.targets
        payload = {
            "samples": credited.samples,
            "since_proximal": version - self._batch_version,
            "keep": version if self._keeps(version) else None,
            "old_values": [] if targets is None else list(targets.old_values),
            "returns": [] if targets is None else list(targets.returns),
        }
        done: tuple[StepStats, CriticStats | None] = self._call("train", payload)
        stats, of_critic = done
        metrics = step_stats_metrics(stats) | ({} if targets is None else critic_metrics(targets, of_critic))
        return StepResult(None if stats.skip_reason is None else stats.skip_reason.value, metrics)

    def snapshot(self, probe_sequences: Sequence[Sequence[int]]) -> tuple[SendBuffer, Probe]:
        """Copy the weights into a send buffer, and score the probe under them."""
        temperature = self._config.rollout.temperature
        sequences = [np.asarray(sequence, dtype=np.int32) for sequence in probe_sequences]
        scores = self._call("score", {"sequences": sequences, "temperature": temperature})
        buffer: SendBuffer = self._call("gather", self._snapshots.request())
        return buffer, Probe(tuple(sequences), tuple(scores), temperature)

    def tolerance(self) -> Tolerance:
        """What the proof of a push accepts: float32 everywhere, the maximum; else the mean, within three times the noise
        that bfloat16 makes on this model."""
        noise = self._policy.rounding_noise
        return Tolerance(self._config.weights.probe_tolerance) if noise is None else Tolerance(3 * noise, "mean")

    @property
    def rounding_noise(self) -> float | None:
        """Mean |bfloat16 − float32| logprob of this model, nats; None where everything computes in float32."""
        return self._policy.rounding_noise

    @property
    def kept_version(self) -> int | None:
        """An earlier version whose weights are at hand, and which engines had."""
        return self._kept.version

    def mark_compared(self) -> None:
        """Tokens of kept_version were compared: the next version may take its place."""
        self._kept.is_compared = True

    def _keeps(self, version: int) -> bool:
        """Whether to keep the weights of `version` before the step that leaves them; what is kept stays until its tokens were
        compared, or are too old, however late they arrive."""
        validation, kept = self._config.validation, self._kept
        was_pushed = version % self._config.weights.push_every == 0
        if not validation.keep_previous or validation.tokens_per_step == 0 or not was_pushed:
            return False
        return kept.version is None or kept.is_compared or version + 1 - kept.version > self._config.staleness.max_lag

    def scores(
        self, sequences: Sequence[Any], *, temperature: float, head: Path | None = None, previous: bool = False
    ) -> list[Any]:
        """Logprobs of int32 sequences' tokens but the first, as the policy is now, or as kept_version was (`previous`).

        head: model directory whose head to use instead.
        """
        payload = {
            "sequences": list(sequences),
            "temperature": temperature,
            "head": None if head is None else str(head),
            "previous": previous,
        }
        scores: list[Any] = self._call("score", payload)
        return scores

    def canary(self) -> Canary | None:
        """What an engine is tried with before its first version; None if weights.canary is off."""
        scores = self._policy.canary
        if scores is None:
            return None
        tolerance = Tolerance(FLOAT32_SLACK * self._config.weights.probe_tolerance)
        if scores.noise is not None:
            tolerance = Tolerance(3 * scores.noise, "mean")
        return Canary(CANARY_SEED, scores.scales, scores.probe, tolerance)

    def random_sequences(self, count: int) -> list[list[int]]:
        """Token ids for a probe before anything was sampled; the same at every call."""
        generator = np.random.default_rng(0)
        vocabulary = int(self._policy.hf.config.vocab_size)
        return [generator.integers(0, vocabulary, size=16).tolist() for _ in range(count)]

    def save(self, progress: Progress, position: Position, *, epoch: int) -> Future[Path]:
        """Copy everything that `restore` needs; it is written beside the steps that follow. One at a time.

        The future raises CheckpointError, or EpochFenced if a newer trainer has started meanwhile.
        """
        meta = {**progress.to_meta(), "log_segment": position.segment, "log_offset": position.offset}
        done: Future[Path] = self._call("save", {"version": progress.version, "meta": meta, "epoch": epoch})
        return done

    def full_weights(self) -> dict[str, Tensor]:
        """A copy of every tensor of the policy, and of the critic behind `critic.`, whole. For one rank alone."""
        weights = {name: tensor.clone() for name, tensor in self._policy.named_full_tensors()}
        if self._critic is not None:
            weights |= {f"{CRITIC}{name}": tensor.clone() for name, tensor in self._critic.model.named_full_tensors()}
        return weights

    def idle(self) -> None:
        """Keep the other ranks' collectives from timing out while rank 0 waits for groups."""
        if self._ranks.world_size > 1 and time.monotonic() - self._last_command > IDLE_EVERY_S:
            self._call("idle", {})

    def stop(self) -> None:
        """Let the other ranks go; they finish the checkpoint that is on its way."""
        self.thread.close()
        self._snapshots.close()
        if self._ranks.world_size > 1:
            self._broadcast("stop", {})

    # -- the other ranks ---------------------------------------------------------------------------------------------
    def follow(self) -> None:
        """Run rank 0's commands until it stops. A rank 0 that dies ends the wait by the group's time-out."""
        while True:
            with self._watched(WAITING_FOR_COMMAND):
                name, payload = self._receive()
            if name == "stop":
                self._writer.wait()
                return
            with self.work.doing(name), self._watched(name):
                self._commands[name](payload)

    # -- every rank --------------------------------------------------------------------------------------------------
    def _call(self, name: str, payload: Mapping[str, Any]) -> Any:
        self._last_command = time.monotonic()
        with self.work.doing(name), self._watched(name):
            if self._ranks.world_size > 1:
                self._broadcast(name, payload)
            return self._commands[name](payload)

    def _mark_micro_batch(self, index: int) -> None:
        self.work.mark(f"after micro-batch {index + 1}")
        self._ranks.mark(self.work.what)

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Tell the watchdog. A collective that broke or timed out is an error that says who was waited for."""
        watchdog = self._ranks.watchdog
        if watchdog is None:
            yield
            return
        with watchdog.doing(name):
            try:
                yield
            except RuntimeError as error:
                if not is_of_collective(error):
                    raise
                raise DeadlineExceeded(stuck(name, error, watchdog)) from error

    def _do_train(self, payload: Mapping[str, Any]) -> tuple[StepStats, CriticStats | None]:
        samples: Sequence[TrainingSample] = payload["samples"]
        micro_batches = self._own_micro_batches(samples)
        if payload["keep"] is not None:
            self._kept.keep(self._policy, payload["keep"])
        stats = train_step(
            self._policy,
            self.optimizer,
            micro_batches,
            settings=self._settings,
            learning_rate=self._schedule.learning_rate(self._steps_done + 1),
            others=OtherLogprobs(
                proximal=self._proximal_of(samples, micro_batches),
                steps_since_proximal=payload["since_proximal"] if self._interpolates else None,
                reference=self._reference_of(micro_batches),
            ),
        )
        self._steps_done += stats.applied
        return stats, self._teach_critic(payload, micro_batches, stats) if stats.applied else None

    def _teach_critic(
        self, payload: Mapping[str, Any], micro_batches: Sequence[MicroBatch], stats: StepStats
    ) -> CriticStats | None:
        if self._critic is None:
            return None
        old_values, returns = (
            {index: torch.from_numpy(values.copy()) for index, values in enumerate(payload[name])}
            for name in ("old_values", "returns")
        )
        targets = [MicroBatchTargets(lay_out(one, old_values), lay_out(one, returns)) for one in micro_batches]
        return self._critic.learn(
            micro_batches,
            targets,
            num_tokens=stats.num_trained_tokens,
            step=self._steps_done,
            on_micro_batch=self._mark_micro_batch,
        )

    def _do_proximal(self, payload: Mapping[str, Any]) -> None:
        samples: Sequence[TrainingSample] = payload["samples"]
        logprobs = self._of_all(samples, partial(policy_logprobs, self._policy))
        for sample, values in zip(samples, logprobs, strict=True):
            self._proximal[sample.task_id, sample.member] = values

    def _do_reference(self, payload: Mapping[str, Any]) -> list[Tensor]:
        if self._reference is None:
            raise AsyncRLError("algorithm.kl_coef is above 0, but no reference policy was loaded")
        return self._of_all(payload["samples"], partial(policy_logprobs, self._reference))

    def _do_values(self, payload: Mapping[str, Any]) -> list[Tensor]:
        if self._critic is None:
            raise AsyncRLError("algorithm.advantage is 'gae', but no critic was loaded")
        return self._of_all(payload["samples"], self._critic.values)

    def _of_all(self, samples: Sequence[TrainingSample], compute: Callable[..., list[Tensor]]) -> list[Tensor]:
        """A number for every token of every sample: each rank computes its share, then everyone has all of them."""
        micro_batches = self._own_micro_batches(samples)
        own = unpack(micro_batches, compute(micro_batches, on_micro_batch=self._mark_micro_batch))
        starts = np.concatenate(([0], np.cumsum([len(sample) for sample in samples])))
        everything = torch.zeros(int(starts[-1]), device=self._policy.device)
        for index, values in own.items():
            everything[starts[index] : starts[index + 1]] = values
        if self._ranks.world_size > 1:
            dist.all_reduce(everything)
        return [everything[start:end] for start, end in pairwise(starts)]

    def _proximal_of(self, samples: Sequence[TrainingSample], micro_batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Proximal logprobs per micro-batch, or None where the policy itself is the proximal one (a batch's first step)."""
        if not all((sample.task_id, sample.member) in self._proximal for sample in samples):
            return None
        values = {index: self._proximal[sample.task_id, sample.member][: len(sample)] for index, sample in enumerate(samples)}
        return [lay_out(micro_batch, values).to(self._policy.device) for micro_batch in micro_batches]

    def _reference_of(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Reference logprobs per micro-batch, where the loss asks for them."""
        if self._settings.kl is None or self._reference is None:
            return None
        return policy_logprobs(self._reference, micro_batches, on_micro_batch=self._mark_micro_batch)

    @property
    def _interpolates(self) -> bool:
        return self._config.algorithm.proximal == "interpolate"

    def _do_score(self, payload: Mapping[str, Any]) -> Any:
        head = None if payload.get("head") is None else load_head(Path(payload["head"]), self._policy)
        sequences = [s.tolist() for s in payload["sequences"]]
        with self._kept.in_place(self._policy) if payload.get("previous") else nullcontext():
            return self._policy.score(sequences, temperature=payload["temperature"], head_weight=head)

    def _do_save(self, payload: Mapping[str, Any]) -> Future[Path]:
        epoch = payload["epoch"]
        return self._writer.start(WriteRequest(payload["version"], payload["meta"], epoch, partial(self._is_fenced, epoch)))

    def _is_fenced(self, epoch: int) -> bool:
        return newest_epoch(self._layout.intake_dir) > epoch

    def _do_load(self, payload: Mapping[str, Any]) -> None:
        checkpoint = open_checkpoint(Path(payload["path"]))
        load_checkpoint(checkpoint, self._policy, self.optimizer, self._critic)
        self._steps_done = checkpoint.meta["version"]

    def _own_micro_batches(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        trainer = self._config.trainer
        every_rank = balance(
            samples, trainer.max_tokens_per_micro_batch, self._ranks.world_size, share_prompts=trainer.share_prompts
        )
        return every_rank[self._ranks.rank]

    # -- commands on the wire ----------------------------------------------------------------------------------------
    def _broadcast(self, name: str, payload: Mapping[str, Any]) -> None:
        send_command(name, payload, self._policy.device)

    def _receive(self) -> tuple[str, Mapping[str, Any]]:
        name, payload = receive_command(self._policy.device)
        if name not in self._commands and name != "stop":
            raise AsyncRLError(f"rank 0 sent the unknown command {name!r}: ranks run different versions of async-rl")
        return name, payload
