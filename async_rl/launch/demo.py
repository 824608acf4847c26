"""`async-rl demo`: make a tiny model, warm it up, train it with every role a process of its own, and tell how it went."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from async_rl.config import RunConfig, check, load_config
from async_rl.config.run import ModelConfig
from async_rl.environments.base import RowSource
from async_rl.environments.load import load_environment
from async_rl.errors import ConfigError
from async_rl.evaluation.held_out import EvaluationPlan, EvaluationResult, SampleCompletion
from async_rl.launch.demo_model import demo_model, demo_tokenizer, save_model
from async_rl.launch.evaluate import evaluate_model
from async_rl.launch.export import export_run
from async_rl.launch.local import RunEnd, RunResult, run_display, supervise
from async_rl.launch.prepare import PreparedRun, prepare
from async_rl.launch.run_lock import run_lock
from async_rl.launch.supervisor import catch_stop_signals
from async_rl.launch.user_code import require_user_code
from async_rl.launch.warmup import WarmupPlan, warm_up
from async_rl.monitor.charts import write_reward_png
from async_rl.monitor.figures import RunFigures, evaluation_figures, run_figures, write_figures
from async_rl.monitor.metrics_file import MetricsHistory
from async_rl.monitor.status import held_out_line
from async_rl.monitor.summary import Accuracy, Sample, SummaryPage, print_summary
from async_rl.monitor.text import program
from async_rl.run_dir.evaluations import read_evaluations
from async_rl.run_dir.layout import RunLayout, write_atomic

DEMO_CONFIG = Path(__file__).with_name("demo.toml")
FIGURE_KEYS = (
    "train_seconds",
    "steps",
    "lag_mean",
    "lag_max",
    "dropped_share",
    "push_p50_s",
    "trainer_idle_share",
    "rollout_idle_share",
    "parity_max_abs",
    "parity_tokens",
    "tokens_trained_per_s",
)

Figures: TypeAlias = Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The run, and the figures of summary.json (empty if it was interrupted)."""

    run: RunResult
    figures: Figures


def demo_config(overrides: Sequence[str], *, path: Path | None = None, resume: bool = False) -> RunConfig:
    """The config at `path` (the demo's own; to resume: that of the run), `overrides` on top. Without a model it is made.

    Raises: ConfigError.
    """
    unset = "--model.path=made-by-the-demo"
    loaded = load_config(path or DEMO_CONFIG, [unset, *overrides])
    layout = RunLayout(loaded.config.run_dir)
    if resume and layout.config_toml.exists():
        return load_config(layout.config_toml, [f"--run_dir={layout.root}", *overrides]).config
    if loaded.origins["model.path"].where != unset:
        return loaded.config
    model = ModelConfig(path=layout.model_dir.absolute())
    return loaded.config.model_copy(update={"model": model})


def run_demo(config: RunConfig, *, resume: bool = False, overwrite: bool = False, console: Console | None = None) -> DemoResult:
    """The whole demo. `config.model.path` below the run directory says: make and warm up a model there.

    Raises: as `async_rl.run`; ConfigError if the environment brings no prompts to warm up on and to evaluate with.
    """
    console = console or Console()
    check(config)
    require_user_code(config)
    _require_rows(config)
    torch.set_num_threads(1)
    with run_lock(config.run_dir):
        prepared = prepare(config, resume=resume, overwrite=overwrite)
        layout = prepared.layout
        if config.model.path == layout.model_dir.absolute():
            make_model(config, layout, console)
        start = _start_evaluation(config, layout, console)
        with catch_stop_signals() as stop:
            display = run_display(config, prepared, console=console)
            result = supervise(config, prepared, stop, display=display)
        if result.end is RunEnd.INTERRUPTED:
            return DemoResult(result, {})
        return DemoResult(result, _finish(config, prepared, start, console))


def _require_rows(config: RunConfig) -> None:
    environment = load_environment(config.environment)
    if not isinstance(environment, RowSource):
        raise ConfigError(
            f"environment.name={config.environment.name!r} brings no prompts of its own, which the demo warms up on and "
            f"evaluates with; use a built-in task such as sort_digits, or `async-rl run`"
        )
    is_made = config.model.path == RunLayout(config.run_dir).model_dir.absolute()
    if is_made and not isinstance(environment.row(0).prompt, str):
        raise ConfigError(
            f"environment.name={config.environment.name!r} speaks in chat messages, which the model that the demo makes cannot "
            f"read; name one with a chat template: --model.path=DIR"
        )


def make_model(config: RunConfig, layout: RunLayout, console: Console) -> None:
    """Make the tiny llama and warm it up, from the run's seed; a model that is there already is kept."""
    if (layout.model_dir / "config.json").exists():
        return
    source = load_environment(config.environment)
    assert isinstance(source, RowSource)  # checked before anything was written
    tokenizer = demo_tokenizer()
    num_heads = 4 if config.rollout.engine == "torch" else 2  # vLLM's CPU kernels know no head of fewer than 32 dimensions
    model = demo_model(tokenizer, seed=config.seed, num_heads=num_heads)
    plan = WarmupPlan(seed=config.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with _progress(console, f"warm-up of a {parameters / 1e6:.2f} M parameter llama", plan.steps) as advance:
        loss = warm_up(model, tokenizer, source, plan, on_step=lambda step, _: advance(step))
    console.print(f"warmed up on {plan.steps * plan.batch_size:,} pairs, last loss {loss:.3f} nats a token", highlight=False)
    save_model(layout.model_dir, model, tokenizer)


def _start_evaluation(config: RunConfig, layout: RunLayout, console: Console) -> EvaluationResult:
    """Accuracy before training; measured once in a run's life."""
    path = layout.evaluation_start_json
    if path.exists():
        return _read_evaluation(path)
    result = _evaluate(config, config.model.path, "accuracy before training", console)
    write_atomic(path, json.dumps(asdict(result), indent=2).encode())
    return result


def _evaluate(config: RunConfig, model_dir: Path, title: str, console: Console) -> EvaluationResult:
    plan = EvaluationPlan(
        num_prompts=config.evaluation.prompts, temperature=1.0, max_new_tokens=config.rollout.max_new_tokens, seed=config.seed
    )
    with _progress(console, title, plan.num_prompts) as advance:
        result = evaluate_model(config, model_dir, plan, on_progress=lambda done, _: advance(done))
    console.print(f"{title}: {Accuracy(result.mean_reward, result.standard_error)}", highlight=False)
    return result


def _read_evaluation(path: Path) -> EvaluationResult:
    fields = json.loads(path.read_text())
    samples = tuple(SampleCompletion(**sample) for sample in fields.pop("samples"))
    return EvaluationResult(**fields, samples=samples)


def _finish(
    config: RunConfig, prepared: PreparedRun, start: EvaluationResult, console: Console
) -> Mapping[str, float | int | None]:
    """Export, evaluate, write what programs read, and print what people read."""
    layout = prepared.layout
    trained = layout.root / "trained"
    shutil.rmtree(trained, ignore_errors=True)
    export_run(layout.root, trained)
    end = _evaluate(config, trained, "accuracy after training", console)
    history = MetricsHistory(layout.metrics_jsonl)
    history.refresh()
    figures = run_figures(history, layout)
    evaluations = read_evaluations(layout.evaluations_jsonl)
    summary = {
        **summary_figures(figures, accuracy_start=start.mean_reward, accuracy_end=end.mean_reward),
        **evaluation_figures(evaluations),
    }
    write_figures(layout.summary_json, summary)
    png = layout.root / "reward.png"
    write_reward_png(
        png,
        steps=[step.step for step in history.steps if step.get("reward_mean") is not None],
        rewards=history.series("reward_mean"),
        lag_histogram=figures.lag_histogram,
        title=f"{config.environment.name}: sampled accuracy {start.mean_reward:.2f} → {end.mean_reward:.2f}",
        evaluations=evaluations,
    )
    print_summary(_page(config, prepared, history, figures, start, end), console)
    return summary


def summary_figures(figures: RunFigures, *, accuracy_start: float, accuracy_end: float) -> Figures:
    """What summary.json holds: a public interface."""
    return {
        "accuracy_start": accuracy_start,
        "accuracy_end": accuracy_end,
        **{key: getattr(figures, key) for key in FIGURE_KEYS},
    }


def _page(
    config: RunConfig,
    prepared: PreparedRun,
    history: MetricsHistory,
    figures: RunFigures,
    start: EvaluationResult,
    end: EvaluationResult,
) -> SummaryPage:
    layout = prepared.layout
    return SummaryPage(
        title=f"{config.environment.name}  [dim]{prepared.identity.run_id}[/]",
        figures=figures,
        max_lag=config.staleness.max_lag,
        history=history,
        num_prompts=end.num_prompts,
        start=Accuracy(start.mean_reward, start.standard_error),
        end=Accuracy(end.mean_reward, end.standard_error),
        samples=_paired(start.samples, end.samples),
        places=(
            ("model", layout.root / "trained"),
            ("checkpoints", layout.checkpoints_dir),
            ("reward curve", layout.root / "reward.png"),
            ("figures", layout.summary_json),
        ),
        next_commands=next_commands(config, layout),
        held_out=held_out_line(evaluations) if (evaluations := read_evaluations(layout.evaluations_jsonl)) else "",
    )


def _paired(before: Sequence[SampleCompletion], after: Sequence[SampleCompletion]) -> Sequence[Sample]:
    """Answers to the same prompts, before and after training."""
    earlier = {sample.prompt: sample for sample in before}
    return [
        Sample(late.prompt, early.completion, early.reward, late.completion, late.reward)
        for late in after
        if (early := earlier.get(late.prompt)) is not None
    ]


def next_commands(config: RunConfig, layout: RunLayout) -> Sequence[tuple[str, str]]:
    """Commands that work as they stand."""
    name, root = program(), layout.root
    length = 6 if config.environment.args.get("length") == 5 else 5
    another = (f"{name} demo --run_dir={root}-{length} --environment.args.length={length}", "another length of the task")
    return (
        (f"{name} show {root}", "a trajectory of the run: tokens, logprobs, versions, reward"),
        (f"{name} audit {root}", "how every task of the run ended"),
        *((another,) if config.environment.name == "sort_digits" else ()),
        (f"{name} demo --run_dir={root} --resume --trainer.max_steps={config.trainer.max_steps * 2}", "train further"),
    )


@contextmanager
def _progress(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere nothing, the result is printed anyway."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
