"""How much staleness costs each method on sort_digits: fixed lag, paired seeds, the trainer's own step.

python tests/bench/staleness_study.py [--out runs/staleness-study] [--seeds 5] [--updates 160] [--minutes M] [--report]

A synchronous loop: update v trains what version max(0, v − lag) sampled, so every token is exactly `lag` optimizer steps old
once the loop is under way. 16 prompts × 8 answers an update, GRPO advantages, AdamW. The learning rate is swept for each method
at lag 8 on a seed of its own; then each seed runs every method at every lag from the same warm start and on the same prompts
(paired). Score: share of held-out prompts solved by sampling at T = 1 after the last update.

Results are appended to OUT/results.jsonl, one line a run; what is there is not run again, so it can be stopped at any time.
`--report` writes docs/staleness-study.md and .png from what is there.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rl.algorithms.advantages import ADVANTAGES
from async_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation
from async_rl.algorithms.credit import AdvantageSettings, RewardGroup
from async_rl.algorithms.losses import LOSSES, ClipRange, LossSettings
from async_rl.environments.sort_digits import SortDigits
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.warmup import WarmupPlan, warm_up
from async_rl.model.load import load_causal_lm
from async_rl.trainer.packing import pack
from async_rl.trainer.policy import PolicyModel, load_policy
from async_rl.trainer.samples import TrainingSample
from async_rl.trainer.step import StepSettings, make_optimizer, train_step

LAGS = (0, 2, 8, 32)
SWEEP_LAG, SWEEP_SEED, RATES = 8, 1000, (1e-4, 2e-4, 4e-4, 8e-4)
PROMPTS, GROUP, DIGITS, HELD_OUT = 16, 8, 6, 512
MAX_NEW = DIGITS + 2
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Method:
    """A loss with its settings, as a config would choose it."""

    loss: str
    settings: LossSettings
    aggregation: Aggregation = TOKEN_MEAN


DEFAULT_CLIP = ClipRange(0.2, 0.28)
METHODS: Mapping[str, Method] = {
    "no correction": Method("policy_gradient", LossSettings(DEFAULT_CLIP, importance="none")),
    "clipped_surrogate": Method("clipped_surrogate", LossSettings(DEFAULT_CLIP)),
    "decoupled_clip": Method("decoupled_clip", LossSettings(DEFAULT_CLIP)),
    "sequence weights": Method("policy_gradient", LossSettings(DEFAULT_CLIP, importance_level="sequence")),
    "cispo": Method("cispo", LossSettings(ClipRange(1.0, 4.0))),
    "gspo": Method("gspo", LossSettings(ClipRange(0.1, 0.15)), Aggregation("sequence_mean_of_means")),
}
"""gspo with the range of short answers; the paper's is that of long ones."""


@dataclass(frozen=True)
class Run:
    """One training."""

    method: str
    lag: int
    seed: int
    learning_rate: float
    updates: int


# -- training ------------------------------------------------------------------------------------------------------------
class Task:
    """Prompts as token ids, all of one length, and how an answer scores."""

    def __init__(self) -> None:
        self.source = SortDigits(DIGITS)
        self.tokenizer = demo_tokenizer()
        self.eos = int(self.tokenizer.eos_token_id)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Tensor, list[list[int]]]:
        rows = [self.source.row(int(index)) for index in rng.integers(0, self.source.num_rows(), count)]
        return self.encode(rows)

    def held_out(self) -> tuple[Tensor, list[list[int]]]:
        return self.encode(self.source.held_out_rows(HELD_OUT))

    def encode(self, rows: Sequence[Any]) -> tuple[Tensor, list[list[int]]]:
        prompts = torch.tensor([self.tokenizer.encode(row.prompt) for row in rows])
        answers = [[*self.tokenizer.encode(row.columns["answer"]), self.eos] for row in rows]
        return prompts, answers


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Tensor, eos: int, generator: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """Answers (ids with their end, and logprobs) at T = 1, one per row."""
    ids, cache = prompts, None
    tokens, logs = [], []
    for _ in range(MAX_NEW):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        distribution = output.logits[:, -1].log_softmax(-1)
        ids = torch.multinomial(distribution.exp(), 1, generator=generator)
        tokens.append(ids[:, 0])
        logs.append(distribution.gather(1, ids)[:, 0])
    table, values = torch.stack(tokens, dim=1), torch.stack(logs, dim=1)
    lengths = [row.index(eos) + 1 if eos in row else MAX_NEW for row in table.tolist()]
    return [(table[i, :n].tolist(), values[i, :n].tolist()) for i, n in enumerate(lengths)]


def train(run: Run, warm_start: Path) -> float:
    """Train, and return the share of held-out prompts solved."""
    torch.manual_seed(run.seed)
    task, rng = Task(), np.random.default_rng(run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    policy, sampler = load_policy(warm_start), load_causal_lm(warm_start)
    optimizer = make_optimizer(policy, learning_rate=run.learning_rate)
    method = METHODS[run.method]
    settings = StepSettings(LOSSES[method.loss], method.settings, method.aggregation)
    versions: deque[dict[str, Tensor]] = deque([_weights(policy)], maxlen=run.lag + 1)
    for update in range(run.updates):
        sampler.load_state_dict(versions[0])
        samples = _samples(task, sampler, rng, generator, lag=len(versions) - 1)
        # linear decay to a tenth
        rate = run.learning_rate * (1 - 0.9 * update / max(run.updates - 1, 1))
        if samples:
            train_step(policy, optimizer, pack(samples, 4096, share_prompts=True), settings=settings, learning_rate=rate)
        versions.append(_weights(policy))
    sampler.load_state_dict(_weights(policy))
    prompts, answers = task.held_out()
    final = sample(sampler, prompts, task.eos, torch.Generator().manual_seed(0))
    return float(np.mean([ids == answer for (ids, _), answer in zip(final, answers, strict=True)]))


def _weights(policy: PolicyModel) -> dict[str, Tensor]:
    return copy.deepcopy({name: tensor.detach() for name, tensor in policy.hf.state_dict().items()})


def _samples(
    task: Task, sampler: PreTrainedModel, rng: np.random.Generator, generator: torch.Generator, *, lag: int
) -> list[TrainingSample]:
    prompts, answers = task.draw(rng, PROMPTS)
    rows = sample(sampler, prompts.repeat_interleave(GROUP, dim=0), task.eos, generator)
    groups = [rows[i : i + GROUP] for i in range(0, len(rows), GROUP)]
    rewards = [
        RewardGroup.of([float(ids == answer) for ids, _ in group], num_tokens=[len(ids) for ids, _ in group])
        for group, answer in zip(groups, answers, strict=True)
    ]
    credited = ADVANTAGES["grpo"](rewards, AdvantageSettings())
    return [
        _to_sample(prompt, ids, logs, float(credit), lag, f"t{number}", member)
        for number, (prompt, group, row) in enumerate(zip(prompts.tolist(), groups, credited, strict=True))
        for member, ((ids, logs), credit) in enumerate(zip(group, row, strict=True))
    ]


def _to_sample(
    prompt: list[int], ids: list[int], logs: list[float], credit: float, lag: int, task_id: str, member: int
) -> TrainingSample:
    mask = np.arange(len(prompt) + len(ids)) >= len(prompt)
    return TrainingSample(
        token_ids=np.array([*prompt, *ids], dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.array([0.0] * len(prompt) + logs, dtype=np.float32),
        advantages=np.where(mask, credit, 0.0).astype(np.float32),
        lags=np.where(mask, lag, 0).astype(np.int32),
        temperature=1.0,
        task_id=task_id,
        member=member,
    )


def make_warm_start(out: Path, seed: int) -> Path:
    """The demo's model after its supervised warm-up, one per seed."""
    directory = out / f"warm-{seed}"
    if not directory.exists():
        tokenizer = demo_tokenizer()
        model = demo_model(tokenizer, seed=seed)
        warm_up(model, tokenizer, SortDigits(DIGITS), WarmupPlan(steps=100, seed=seed))
        out.mkdir(parents=True, exist_ok=True)
        save_model(directory, model, tokenizer)
    return directory


# -- what to run ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    """A finished run."""

    run: Run
    accuracy: float
    seconds: float


def read_results(out: Path) -> list[Result]:
    path = out / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [Result(Run(**row["run"]), row["accuracy"], row["seconds"]) for row in rows]


def best_rates(results: Sequence[Result], updates: int) -> dict[str, float]:
    """Learning rate of the best sweep run of each method whose sweep is complete."""
    best: dict[str, float] = {}
    for method in METHODS:
        swept = [
            r
            for r in results
            if (r.run.method, r.run.lag, r.run.seed, r.run.updates) == (method, SWEEP_LAG, SWEEP_SEED, updates)
        ]
        if {r.run.learning_rate for r in swept} == set(RATES):
            best[method] = max(swept, key=lambda r: r.accuracy).run.learning_rate
    return best


def plan(results: Sequence[Result], *, seeds: int, updates: int) -> Iterator[Run]:
    """Runs that are left: first the sweeps, then whole seeds, one after the other."""
    done = {result.run for result in results}
    sweep = [Run(method, SWEEP_LAG, SWEEP_SEED, rate, updates) for method in METHODS for rate in RATES]
    left = [run for run in sweep if run not in done]
    if left:
        yield from left
        return
    rates = best_rates(results, updates)
    for seed in range(seeds):
        for lag in LAGS:
            for method in METHODS:
                run = Run(method, lag, seed, rates[method], updates)
                if run not in done:
                    yield run


def run_study(out: Path, *, seeds: int, updates: int, minutes: float) -> None:
    deadline = time.monotonic() + 60 * minutes
    while (run := next(plan(read_results(out), seeds=seeds, updates=updates), None)) is not None:
        if time.monotonic() > deadline:
            print(f"stopped after {minutes:g} minutes; run it again to go on")
            return
        started = time.monotonic()
        accuracy = train(run, make_warm_start(out, run.seed))
        line = {"run": asdict(run), "accuracy": accuracy, "seconds": round(time.monotonic() - started, 1)}
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{run.method:20} lag {run.lag:2} seed {run.seed:4} lr {run.learning_rate:g}: {accuracy:.3f}", flush=True)


# -- the page ------------------------------------------------------------------------------------------------------------
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t, two-sided 95 %, by number of seeds."""


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half width of its 95 % interval; None from one value)"""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, T_95.get(len(values), 2.26) * statistics.stdev(values) / len(values) ** 0.5


def complete_seeds(results: Sequence[Result], updates: int) -> dict[int, dict[tuple[str, int], float]]:
    """Seeds with every method at every lag at its chosen rate: only those can be compared in pairs."""
    rates = best_rates(results, updates)
    seeds: dict[int, dict[tuple[str, int], float]] = {}
    for result in results:
        run = result.run
        if run.updates == updates and run.seed != SWEEP_SEED and rates.get(run.method) == run.learning_rate:
            seeds.setdefault(run.seed, {})[run.method, run.lag] = result.accuracy
    return {seed: cells for seed, cells in seeds.items() if len(cells) == len(METHODS) * len(LAGS)}


def _cell(mean: float, half: float | None) -> str:
    return f"{mean:.2f}" if half is None else f"{mean:.2f} ± {half:.2f}"


def table(seeds: Mapping[int, Mapping[tuple[str, int], float]], rates: Mapping[str, float]) -> str:
    """Accuracy per method and lag, and how far lags 8 and 32 lie from the same method's on-policy result, in pairs."""
    lines = [
        "| method | learning rate | " + " | ".join(f"lag {lag}" for lag in LAGS) + " | lag 8 − lag 0 | lag 32 − lag 0 |",
        "|---|---|" + "---|" * (len(LAGS) + 2),
    ]
    for method in METHODS:
        cells = [_cell(*interval([cells[method, lag] for cells in seeds.values()])) for lag in LAGS]
        paired = [_cell(*interval([cells[method, lag] - cells[method, 0] for cells in seeds.values()])) for lag in (8, 32)]
        lines.append(f"| {method} | {rates[method]:g} | " + " | ".join([*cells, *paired]) + " |")
    return "\n".join(lines)


def sweep_table(results: Sequence[Result], updates: int) -> str:
    """Accuracy of the sweep's runs, one row a method."""
    found = {
        (r.run.method, r.run.learning_rate): r.accuracy for r in results if (r.run.seed, r.run.updates) == (SWEEP_SEED, updates)
    }
    lines = ["| method | " + " | ".join(f"{rate:g}" for rate in RATES) + " |", "|---|" + "---|" * len(RATES)]
    lines += ["| " + " | ".join([method, *(f"{found[method, rate]:.2f}" for rate in RATES)]) + " |" for method in METHODS]
    return "\n".join(lines)


def plot(seeds: Mapping[int, Mapping[tuple[str, int], float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    positions = range(len(LAGS))
    for shift, method in enumerate(METHODS):
        points = [interval([cells[method, lag] for cells in seeds.values()]) for lag in LAGS]
        axes.errorbar(
            [p + 0.05 * (shift - len(METHODS) / 2) for p in positions],
            [mean for mean, _ in points],
            yerr=[half or 0.0 for _, half in points],
            marker="o",
            capsize=3,
            label=method,
        )
    axes.set_xticks(list(positions), [str(lag) for lag in LAGS])
    axes.set_xlabel("lag (optimizer steps)")
    axes.set_ylabel("held-out accuracy, sampled")
    axes.set_title(f"sort_digits, {len(seeds)} paired seed(s), bars: 95 % interval")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def report(out: Path, *, updates: int) -> None:
    results = read_results(out)
    seeds = complete_seeds(results, updates)
    if not seeds:
        raise SystemExit(f"{out}/results.jsonl has no complete seed yet; run the study further")
    rates = best_rates(results, updates)
    page = ROOT / "docs/staleness-study.md"
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    text = (
        f"Paired seeds: {len(seeds)}. Updates in each run: {updates}. Mean ± half of its 95 % interval (Student's t); no "
        f"interval from one seed.\n\n{table(seeds, rates)}\n\n"
        f"The sweep, by learning rate (lag {SWEEP_LAG}, one seed):\n\n{sweep_table(results, updates)}\n"
    )
    page.write_text(f"{head}{BEGIN}\n{text}{END}{tail}", encoding="utf-8")
    plot(seeds, ROOT / "docs/staleness-study.png")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness-study"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after the run that exceeds this")
    parser.add_argument("--report", action="store_true", help="only write the page from what was run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        run_study(arguments.out, seeds=arguments.seeds, updates=arguments.updates, minutes=arguments.minutes)
    report(arguments.out, updates=arguments.updates)


if __name__ == "__main__":
    main()
