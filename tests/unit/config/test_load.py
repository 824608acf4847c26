from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from async_rl.config import dump_toml, load_config
from async_rl.config.fields import leaf_fields, sections
from async_rl.config.load import Origin
from async_rl.config.run import ModelConfig, RunConfig
from async_rl.config.trainer import TrainerConfig
from async_rl.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text)
        return path

    return write


def load(path: Path | None = None, *overrides: str, **env: str) -> RunConfig:
    return load_config(path, ["--model.path=/m", *overrides], env).config


def refusal(path: Path | None = None, *overrides: str, **env: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, *overrides, **env)
    return str(error.value)


def test_flag_beats_environment_beats_file_beats_default(toml):
    path = toml("seed = 1\n[trainer]\nmax_steps = 1\ngroups_per_step = 1\nworld_size = 1\n")
    env = {"ASYNC_RL_TRAINER__MAX_STEPS": "2", "ASYNC_RL_TRAINER__GROUPS_PER_STEP": "2"}
    resolved = load_config(path, ["--model.path=/m", "--trainer.max_steps=3"], env)
    assert resolved.config.trainer.max_steps == 3
    assert resolved.config.trainer.groups_per_step == 2
    assert resolved.config.trainer.world_size == 1
    assert resolved.origins["trainer.max_steps"] == Origin("flag", "--trainer.max_steps=3")
    assert resolved.origins["trainer.groups_per_step"] == Origin("environment", "ASYNC_RL_TRAINER__GROUPS_PER_STEP")
    assert resolved.origins["trainer.world_size"] == Origin("file", str(path))
    assert resolved.origins["trainer.weight_decay"] == Origin("default")


def test_every_setting_has_an_origin():
    origins = load_config(None, ["--model.path=/m"], {}).origins
    assert {"seed", "run_dir", "model.path", "environment.args", "logging.level", "trainer.betas"} <= set(origins)
    assert "trainer" not in origins


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("--trainer.learning_rate=.5", "trainer", "learning_rate", 0.5),
        ("--trainer.learning_rate=2e-4", "trainer", "learning_rate", 2e-4),
        ("--trainer.learning_rate=1", "trainer", "learning_rate", 1.0),
        ("--trainer.max_steps=1_000", "trainer", "max_steps", 1000),
        ("--trainer.betas=[0.8, 0.95]", "trainer", "betas", (0.8, 0.95)),
        ("--data.shuffle=false", "data", "shuffle", False),
        ("--data.shuffle=False", "data", "shuffle", False),
        ("--data.split=2024", "data", "split", "2024"),
        ("--data.split='a=b'", "data", "split", "a=b"),
        ("--data.source=a=b.jsonl", "data", "source", "a=b.jsonl"),
        ('--data.split="quoted"', "data", "split", "quoted"),
        ("--rollout.max_context=none", "rollout", "max_context", None),
        ("--rollout.kv=keep", "rollout", "kv", "keep"),
        ("rollout.kv=keep", "rollout", "kv", "keep"),
    ],
)
def test_text_is_read_by_the_type_of_its_setting(override, section, key, value):
    found = getattr(getattr(load(None, override), section), key)
    assert found == value
    assert type(found) is type(value)


def test_value_may_follow_as_a_word_of_its_own_and_be_negative():
    config = load(None, "--seed", "7", "--environment.args.shift", "-1")
    assert config.seed == 7
    assert config.environment.args == {"shift": -1}


def test_arguments_of_the_environment_merge_over_the_file_and_keep_their_types(toml):
    path = toml('[environment.args]\nlength = 5\nname = "x"\n')
    config = load(
        path, "--environment.args.length=7", "--environment.args.deep.flag=true", ASYNC_RL_ENVIRONMENT__ARGS__NAME="y"
    )
    assert config.environment.args == {"length": 7, "name": "y", "deep": {"flag": True}}


def test_arguments_set_as_a_whole_replace_those_of_the_file(toml):
    path = toml("[environment.args]\nlength = 5\n")
    assert load(path, "--environment.args={size = 2}").environment.args == {"size": 2}
    flags = ["--model.path=/m", "--environment.args.x=1", "--environment.args={size = 2}", "--environment.args.x=3"]
    resolved = load_config(path, flags, {"ASYNC_RL_ENVIRONMENT__ARGS__LENGTH": "6"})
    assert resolved.config.environment.args == {"size": 2, "x": 3}
    origins = {key: str(origin) for key, origin in resolved.origins.items() if key.startswith("environment.args")}
    assert origins == {
        "environment.args": "flag --environment.args={size = 2}",
        "environment.args.x": "flag --environment.args.x=3",
    }


def test_keys_of_a_table_set_in_the_environment_have_types_and_merge_under_flags():
    env = {"ASYNC_RL_ENVIRONMENT__ARGS": "{length = 5, kind = 'x'}", "ASYNC_RL_ENVIRONMENT__ARGS__DEEP__SIZE": "7"}
    config = load(None, "--environment.args.length=6", **env)
    assert config.environment.args == {"length": 6, "kind": "x", "deep": {"size": 7}}


def test_a_file_may_be_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("seed = 3\n",))
    writer.start()
    assert load(path).seed == 3
    writer.join()


def test_relative_model_path_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(None, ["--model.path=models/tiny"], {}).config.model.path == tmp_path / "models/tiny"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rate = 1.0\n", ["'learning_rate'", "top level", "trainer.learning_rate"]),
        ("[trainer]\nnum-epochs = 3\n", ["'num-epochs'", "'trainer'", "data.data_epochs"]),
        ("[trainer]\nmax_step = 3\n", ["'max_step'", "'trainer'", "trainer.max_steps"]),
        ("[trainer]\nmax-steps = 3\n", ["'max-steps'", "'trainer'", "trainer.max_steps"]),
        ("[trainer]\nkv = 'keep'\n", ["'kv'", "'trainer'", "rollout.kv"]),
        ("[training]\nmax_steps = 3\n", ["'max_steps'", "'training'", "trainer.max_steps"]),
        ("[training]\n", ["'training'", "did you mean"]),
        ("[trainer.optimizer]\nlr = 3\n", ["'lr'", "'trainer.optimizer'", "trainer.learning_rate"]),
        ("trainer = 3\n", ["trainer is a section", "trainer.world_size"]),
        ("[trainer.max_steps]\nx = 3\n", ["trainer.max_steps", "valid integer"]),
    ],
)
def test_unknown_key_in_a_file_names_key_section_and_nearest_known_key(toml, text, parts):
    path = toml(text)
    message = refusal(path)
    assert "\n" not in message
    for part in [*parts, str(path)]:
        assert part in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("--learning_rate=1", ["'learning_rate'", "top level", "trainer.learning_rate"]),
        ("--num-epochs=3", ["'num-epochs'", "top level", "data.data_epochs"]),
        ("--trainer..num_epochs=2", ["'trainer..num_epochs'", "empty name", "data.data_epochs"]),
        ("--trainer..max_steps=2", ["'trainer..max_steps'", "empty name", "trainer.max_steps"]),
        ("--.seed=2", ["'.seed'", "empty name", "mean seed"]),
        ("--trainer.=2", ["'trainer.'", "empty name"]),
        ("--environment.args.=2", ["'environment.args.'", "empty name"]),
        ("--trainer.max_steps.x=2", ["trainer.max_steps is a value", "mean trainer.max_steps?"]),
        ("--trainer=2", ["trainer is a section"]),
        ("--trainer.max_steps", ["has no value"]),
        ("stray", ["has no value"]),
    ],
)
def test_unknown_override_names_key_section_and_nearest_known_key(override, parts):
    message = refusal(None, override)
    assert "\n" not in message
    for part in [*parts, override]:
        assert part in message


def test_unknown_environment_variable_is_refused_and_a_foreign_one_ignored():
    assert "ASYNC_RL_LEARNING_RATE" in (message := refusal(ASYNC_RL_LEARNING_RATE="1"))
    assert "trainer.learning_rate" in message
    assert load(TRAINER__MAX_STEPS="x", PATH="/bin").trainer.max_steps == 100


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[trainer]\nmax_steps = "3"\n', "trainer.max_steps = '3'"),
        ('[trainer]\nlearning_rate = "x"\n', "trainer.learning_rate = 'x'"),
        ("[trainer]\nmax_steps = 3.0\n", "trainer.max_steps = 3.0"),
        ("[trainer]\nmax_steps = 0\n", "trainer.max_steps = 0"),
        ("[trainer]\nbetas = ['a', 0.9]\n", "trainer.betas = 'a'"),
        ("[trainer]\nbetas = [0.9]\n", "trainer.betas"),
        ("[data]\nshuffle = 1\n", "data.shuffle = 1"),
        ("[data]\nsplit = 3\n", "data.split = 3"),
        ("[rollout]\nkv = 'none'\n", "rollout.kv = 'none'"),
        ("[rollout]\nmax_context = 'long'\n", "rollout.max_context = 'long'"),
        ("run_dir = 3\n", "run_dir = 3"),
    ],
)
def test_wrong_type_in_a_file_is_an_error_and_never_converted(toml, text, key):
    path = toml(text)
    message = refusal(path)
    assert message.startswith(key)
    assert str(path) in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["x", "1.5", "0", "", "[1]", "{a = 1}", "1\n2"])
def test_text_that_fits_no_type_names_the_flag(text):
    assert f"(--trainer.max_steps={text})" in refusal(None, f"--trainer.max_steps={text}")


@pytest.mark.parametrize("flag", ["--trainer.learning_rate=inf", "--redis.lease_s=inf", "--trainer.betas=[0.9,inf]"])
def test_an_infinite_number_is_refused_by_name(flag):
    message = refusal(None, flag)
    assert flag in message
    assert "finite" in message


def test_all_problems_are_listed_one_line_each(toml):
    path = toml("learning_rate = 1\n[trainer]\nmax_steps = 'x'\nnum-epochs = 2\n")
    lines = refusal(path, "--rollout.kv=x").splitlines()
    assert lines[0] == "4 problems in the configuration:"
    assert len(lines) == 5


def test_missing_model_path_says_how_to_set_it():
    with pytest.raises(ConfigError, match=r"model\.path is not set.*--model\.path=.*ASYNC_RL_MODEL__PATH"):
        load_config(None, [], {})


def test_missing_file_and_broken_toml_are_one_line(toml, tmp_path):
    assert "absent.toml does not exist" in refusal(tmp_path / "absent.toml")
    message = refusal(toml("[trainer]\nmax_steps = = 3\n"))
    assert "line 2" in message
    assert "\n" not in message
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(tmp_path / "binary.toml")


def test_dumped_config_loads_to_an_equal_one(tmp_path):
    config = load(
        None,
        "--trainer.betas=[0.5, 0.75]",
        "--trainer.learning_rate=1e-7",
        '--data.source=a "b" \\ c\td\x7f ü 🙂',
        "--environment.args={length = 3, 'odd key' = [1, 2.5, {x = true}], day = 2026-12-01}",
        "--rollout.max_context=none",
    )
    path = tmp_path / "dumped.toml"
    path.write_text(dump_toml(config))
    assert load_config(path, [], {}).config == config


def test_dump_documents_every_setting_and_names_what_is_not_set():
    text = dump_toml(load())
    assert "# Peak learning rate of AdamW.\nlearning_rate = 1e-05\n" in text
    assert "# max_context is not set\n" in text
    assert "# The optimizer and its batches.\n[trainer]\n" in text


def test_dump_refuses_what_toml_cannot_say():
    config = RunConfig.model_validate({"model": {"path": "/m"}, "environment": {"args": {"x": [1, None]}}})
    with pytest.raises(ConfigError, match=r"environment\.args\.x\[1\] = None: TOML has no NoneType"):
        dump_toml(config)


def test_dump_for_people_hides_the_password_and_the_loadable_one_keeps_it():
    config = load(None, "--redis.url=redis://user:hunter2@host:6379/0")
    assert "hunter2" not in dump_toml(config, redact=True)
    assert 'url = "redis://user:hunter2@host:6379/0"' in dump_toml(config)


def test_python_users_may_pass_text_for_paths_but_not_text_for_numbers():
    config = RunConfig(model=ModelConfig(path="/m"), run_dir="runs/x")
    assert (config.model.path, config.run_dir) == (Path("/m"), Path("runs/x"))
    with pytest.raises(ValueError, match="max_steps"):
        TrainerConfig.model_validate({"max_steps": "3"})


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load().trainer.max_steps = 3  # type: ignore[misc]  # the point of the test


def test_defaults_are_documented_in_every_section():
    undocumented = [name for name, field in leaf_fields(RunConfig).items() if not field.description]
    assert undocumented == []
    assert all(section.__doc__ for section in sections(RunConfig).values())


@pytest.fixture
def moved_run(tmp_path: Path) -> Path:
    """The config that a run wrote at /old/run, where the run lies now."""
    (tmp_path / "run.json").touch()
    text = 'run_dir = "/old/run"\n[model]\npath = "/old/run/model"\n[data]\nsource = "/old/run/data/rows.jsonl"\n'
    (tmp_path / "config.toml").write_text(text)
    return tmp_path / "config.toml"


def test_a_run_s_own_config_is_read_where_the_run_lies_now(moved_run: Path):
    home = moved_run.parent
    config = load_config(moved_run, [], {}).config
    assert (config.run_dir, config.model.path, config.data.source) == (home, home / "model", str(home / "data/rows.jsonl"))


def test_what_a_moved_run_names_elsewhere_stays_where_it_was(moved_run: Path):
    config = load_config(moved_run, ["--model.path=/models/m", "--data.source=./rows.jsonl", "--run_dir=/other"], {}).config
    assert (config.run_dir, config.model.path, config.data.source) == (Path("/other"), Path("/models/m"), "./rows.jsonl")


def test_a_config_of_the_user_s_own_may_name_any_run_directory(moved_run: Path):
    (moved_run.parent / "run.json").unlink()
    config = load_config(moved_run, [], {}).config
    assert (config.run_dir, config.model.path) == (Path("/old/run"), Path("/old/run/model"))
