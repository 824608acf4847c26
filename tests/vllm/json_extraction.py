"""SmolLM2-135M learns to answer with JSON alone, with vLLM sampling: a real model that two CPU cores improve in minutes.

python tests/vllm/json_extraction.py RUN_DIR [--steps 10] [--section.key=value …]

Prompts are one-shot chats: a sentence, to be answered with a JSON object of four keys. The reward is 1 if the answer parses to
exactly that object. Prints the mean reward of every step, and the pushes. The task is easy for the model when it is not
sampled: much of what it gains is a sharper distribution.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl import run
from async_rl.config import load_config
from async_rl.run_dir.files import read_json_lines
from async_rl.testing.smollm import smollm_directory

NAMES = ("Mark", "Anna", "Peter", "Julia", "Tom", "Laura", "David", "Emma", "Paul", "Sarah", "Lukas", "Nina", "Oscar", "Clara")
JOBS = ("clerk", "nurse", "teacher", "baker", "driver", "lawyer", "farmer", "painter", "pilot", "cook", "doctor", "tailor")
CITIES = ("Vienna", "Berlin", "Paris", "Rome", "Madrid", "Oslo", "Prague", "Lisbon", "Dublin", "Athens", "Warsaw", "Zurich")
TEMPLATES = (
    "{name} is a {age}-year-old {job} from {city}.",
    "{name}, {age}, works as a {job} in {city}.",
    "In {city} lives {name}, a {job} who is {age} years old.",
    "The {job} {name} is {age} and comes from {city}.",
)
SYSTEM = "Extract name, age, job and city as JSON."
NUM_ROWS = 2000
SETTINGS: Mapping[str, Any] = {
    "rollout.engine": "vllm",
    "rollout.dtype": "bfloat16",
    "rollout.vllm.kv_cache_bytes": 2**29,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 40,
    "rollout.max_context": 256,
    "rollout.max_groups_in_flight": 12,
    "staleness.max_lag": 2,
    "algorithm.loss": "clipped_surrogate",
    "trainer.groups_per_step": 12,
    "trainer.learning_rate": 1e-5,
    "trainer.warmup_steps": 3,
    "trainer.betas": "[0.9, 0.95]",
    "trainer.dtype": "bfloat16",
    "trainer.max_tokens_per_micro_batch": 2048,
    "weights.wire_dtype": "bfloat16",
    "weights.deadline_s": 120.0,
    "checkpoint.every_steps": 1000,
    "launch.hang_leases": 0.0,
    "launch.min_healthy_grace_s": 1800.0,
    "launch.start_timeout_s": 1800.0,
    "environment.name": "prompt_reward",
    "environment.reward": "json_extraction:reward",
}


def reward(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's object as JSON, and nothing else."""
    try:
        return float(json.loads(completion) == json.loads(row["answer"]))
    except (ValueError, RecursionError):
        return 0.0


def write_rows(path: Path) -> None:
    generator = random.Random(0)
    example = {"name": "Maria", "age": 41, "job": "dentist", "city": "Lyon"}
    with path.open("w") as file:
        for template in itertools.islice(itertools.cycle(TEMPLATES), NUM_ROWS):
            facts = {
                "name": generator.choice(NAMES),
                "age": generator.randint(18, 80),
                "job": generator.choice(JOBS),
                "city": generator.choice(CITIES),
            }
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": TEMPLATES[0].format(**example)},
                {"role": "assistant", "content": json.dumps(example)},
                {"role": "user", "content": template.format(**facts)},
            ]
            file.write(json.dumps({"prompt": messages, "answer": json.dumps(facts)}) + "\n")


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    model = smollm_directory(root / "model")
    write_rows(root / "rows.jsonl")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where every role finds the reward
    sys.path.insert(0, os.environ["PYTHONPATH"])
    overrides = [f"--{key}={value}" for key, value in SETTINGS.items()]
    places = [f"--run_dir={root / 'run'}", f"--model.path={model}", f"--data.source={root / 'rows.jsonl'}"]
    steps = ["--trainer.max_steps=10"]
    config = load_config(None, [*overrides, *places, *steps, *sys.argv[2:]]).config
    result = run(config, overwrite=True, console=False)
    for step in read_json_lines(result.run_dir / "metrics.jsonl"):
        print(
            f"step {step['step']:3d}  reward {step.get('reward_mean')}  lag {step.get('lag_max')}  {step.get('seconds'):.0f} s"
        )
    pushes = [event for event in read_json_lines(result.run_dir / "events.jsonl") if event["event"] == "push.measured"]
    for push in pushes:
        print(f"push v{push['version']}: live {push['live']}, mean {push['parity_mean_abs']}, {push['seconds']}")


if __name__ == "__main__":
    main()
