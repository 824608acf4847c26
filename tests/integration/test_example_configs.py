"""The example configs, end to end: played with a script that knows the answers, and trained by every role for a step."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from async_rl import RunConfig, run
from async_rl.checks.audit import audit
from async_rl.config import check, load_config
from async_rl.launch.try_environment import Policy, try_environment
from async_rl.model.load import no_progress_bars
from async_rl.run_dir.files import read_json_lines
from async_rl.testing.tiny_models import SPECIAL_TOKENS, char_tokenizer, make_tiny_model
from protocol.messages import Trajectory

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "deploy" / "configs"
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CASES = {
    "trl_reward": ["5"],
    "trl_environment": [
        '<tool_call>{"name": "price_of", "arguments": {"item": "pear"}}</tool_call>',
        '<tool_call>{"name": "buy", "arguments": {"item": "pear", "amount": 3}}</tool_call>',
        "I have it.",
    ],
    "verifiers_taskset": ["0"],
    "reasoning_gym": ["<answer>{answer}</answer>"],
    "code_tests": [json.dumps("```python\ndef square(x):\n    return x * x\n```")],
}
RIGHT = {"verifiers_taskset": 1.1}


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that reads every printable character and has a chat template with tools."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    size = len(SPECIAL_TOKENS) + len(CHARACTERS)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    with no_progress_bars():
        make_tiny_model(vocab_size=size, max_position_embeddings=1024, **small).save_pretrained(path)
    char_tokenizer(CHARACTERS, chat_template=TEMPLATE).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "deploy" / "examples"))
    yield
    for name in [name for name in sys.modules if name.startswith("example_")]:
        del sys.modules[name]


def example(name: str, model: Path, *settings: str) -> RunConfig:
    if name == "code_tests" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    always = [f"--model.path={model}", "--data.shuffle=false", "--rollout.max_new_tokens=128"]
    config = load_config(CONFIGS / f"{name}.toml", [*always, *settings], {}).config
    check(config)
    return config


@pytest.mark.filterwarnings("ignore")  # of what other projects import
@pytest.mark.parametrize("name", CASES)
def test_a_policy_that_knows_the_answer_gets_the_full_reward(name: str, model: Path, tmp_path: Path) -> None:
    config = example(name, model)
    script = tmp_path / "script.txt"
    lines: Sequence[str] = CASES[name]
    if name == "reasoning_gym":
        from async_rl.environments.load import load_environment

        row = load_environment(config.environment).row(0)  # type: ignore[attr-defined]  # it brings rows
        lines = [line.format(answer=row.columns["answer"]) for line in lines]
    script.write_text("\n".join(lines) + "\n")
    (group,) = try_environment(config, Policy(script=script), first_row=0, rows=1, members=1)
    (trajectory,) = group.trajectories
    assert trajectory.reward is not None
    assert trajectory.reward.value == pytest.approx(RIGHT.get(name, 1.0)), trajectory.reward
    assert len(trajectory.turns) == len(lines)
    assert sampled_and_trained(trajectory)


def sampled_and_trained(trajectory: Trajectory) -> bool:
    """What was sampled is trained, and nothing else."""
    sampled = {position for turn in trajectory.turns for position in range(turn.start, turn.end)}
    return [position in sampled for position in range(len(trajectory.token_ids))] == [bool(bit) for bit in trajectory.loss_mask]


def test_every_role_trains_on_a_task_with_tools(model: Path, tmp_path: Path) -> None:
    config = example(
        "trl_environment", model, f"--run_dir={tmp_path}/run", "--trainer.max_steps=1", "--trainer.groups_per_step=2",
        "--trainer.warmup_steps=0",
        "--rollout.group_size=2", "--rollout.max_new_tokens=6", "--redis.lease_s=3.0",
    )  # fmt: skip
    assert run(config, console=False).exit_code == 0
    assert audit(config.run_dir).is_exact
    (line,) = read_json_lines(config.run_dir / "metrics.jsonl")
    assert line["step"] == 1
