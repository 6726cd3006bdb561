import argparse
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from art_backends.config import TrainConfig, add_arguments, from_arguments, load_toml, make_config
from art_backends.errors import ConfigError
from pydantic import ValidationError

# a value of each setting that is not its default, in Python; the other two forms are made of it
OTHER: dict[str, Any] = {
    "base_model": "org/model",
    "name": "other",
    "folder": Path("elsewhere/run"),
    "init_adapter": Path("elsewhere/run/versions/policy@3"),
    "models": ["gpt-4o-mini", "gpt-4o"],
    "nodes": ["agent", "team/writer"],
    "chat_template": Path("my.jinja"),
    "steps": 7,
    "groups_per_step": 3,
    "group_size": 5,
    "dynamic_sampling": 2,
    "concurrency": 9,
    "rollout_timeout": 12.5,
    "straggler_timeout": 2.5,
    "reward_timeout": 3.5,
    "overlap": True,
    "max_staleness": 2,
    "eval_every": 2,
    "target_success": 0.9,
    "target_steps": 4,
    "shuffle": False,
    "seed": 11,
    "temperature": 0.5,
    "top_p": 0.75,
    "max_tokens": 64,
    "history": "template",
    "rank": 4,
    "alpha": 32.0,
    "target_modules": ["q_proj", "v_proj"],
    "rslora": True,
    "optimizer": "sgd",
    "learning_rate": 3e-5,
    "schedule": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "epsilon_low": 0.1,
    "epsilon_high": 0.3,
    "baseline": "leave_one_out",
    "objective": "gspo",
    "importance": "mask",
    "importance_cap": 5.0,
    "importance_floor": 0.5,
    "scale_rewards": True,
    "loss_normalization": "rollout_tokens",
    "normalization_tokens": 64,
    "kl_coefficient": 0.05,
    "kl_estimator": "k1",
    "updates_per_batch": 2,
    "pack_tokens": 1024,
    "gradient_checkpointing": True,
    "max_kl": 0.2,
    "device": "cpu",
    "dtype": "bfloat16",
    "threads": 1,
    "max_model_len": 2048,
}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(words)


def flags(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *value]
        else:
            words += [flag, str(value)]
    return words


def toml(values: dict[str, Any], table: str = "") -> str:
    lines = [table]
    for name, value in values.items():
        plain = str(value) if isinstance(value, Path) else value
        lines.append(f"{name} = {str(plain).lower() if isinstance(plain, bool) else repr(plain)}")
    return "\n".join(lines) + "\n"


def test_every_setting_is_tried_below():
    assert set(OTHER) == set(TrainConfig.model_fields)
    default = TrainConfig()
    assert [name for name, value in OTHER.items() if getattr(default, name) == value] == []


def test_python_flags_and_toml_are_the_same(tmp_path):
    file = tmp_path / "art.toml"
    wanted = TrainConfig(**OTHER)
    assert from_arguments(parse(*flags(OTHER))) == wanted
    for table in ("", "[art]"):
        file.write_text(toml(OTHER, table))
        assert from_arguments(parse(), file) == wanted
        assert make_config(load_toml(file)) == wanted


@pytest.mark.parametrize("name", sorted(OTHER))
def test_each_setting_alone(name, tmp_path):
    file = tmp_path / "art.toml"
    file.write_text(toml({name: OTHER[name]}))
    wanted = TrainConfig(**{name: OTHER[name]})
    assert from_arguments(parse(*flags({name: OTHER[name]}))) == wanted
    assert from_arguments(parse(), file) == wanted


def test_nothing_given_is_the_defaults():
    assert from_arguments(parse()) == TrainConfig()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "art.toml"
    file.write_text("steps = 5\nrank = 2\nscale_rewards = true\n")
    config = from_arguments(parse("--steps", "6", "--no-scale-rewards"), file)
    assert (config.steps, config.rank, config.scale_rewards, config.group_size) == (6, 2, False, 8)


def test_options_that_are_no_settings_are_left_alone():
    namespace = parse("--steps", "3")
    namespace.scenarios = "tasks.jsonl"
    assert from_arguments(namespace).steps == 3


def test_skipped_settings_are_no_options():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, skip=frozenset({"seed"}))
    assert "--seed" not in parser.format_help()
    assert "--steps" in parser.format_help()


def test_help_has_every_description_and_default():
    parser = argparse.ArgumentParser(prog="x", exit_on_error=False)
    add_arguments(parser)
    said = " ".join(parser.format_help().split())
    for name, field in TrainConfig.model_fields.items():
        assert field.description, f"{name} has no description"
        assert f"--{name.replace('_', '-')}" in said
    assert "linear modules that get an adapter" in said
    assert "(default: 0.001)" in said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"group_size": 1}, "group_size: .*greater than or equal to 2.*got 1"),
        ({"group_sizes": 4}, "group_sizes: "),
        ({"rank": "many"}, "rank: .*'many'"),
        ({"learning_rate": float("nan")}, "learning_rate: "),
        ({"learning_rate": float("inf")}, "learning_rate: "),
        ({"rollout_timeout": float("inf")}, "rollout_timeout: "),
        ({"name": "../up"}, "name: "),
        ({"history": "none"}, "history: .*'exact' or 'template'"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"epsilon_low": 1.0}, "epsilon_low: "),
        ({"target_success": 1.5}, "target_success: "),
    ],
)
def test_what_is_wrong_is_named(values, words):
    with pytest.raises(ConfigError, match=f"here: {words}"):
        make_config(values, source="here")


def test_two_wrong_settings_are_both_named():
    with pytest.raises(ConfigError, match=r"steps: .*; rank: "):
        make_config({"rank": 0, "steps": -1})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"steps = ", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"art = 3", r"\[art\] must be a table"),
    ],
)
def test_a_file_that_is_no_settings_is_named(tmp_path, content, words):
    file = tmp_path / "art.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        from_arguments(parse(), file)
    assert str(file) in str(caught.value)


def test_a_wrong_value_of_the_file_names_the_file(tmp_path):
    file = tmp_path / "art.toml"
    file.write_text("stepz = 3\n")
    with pytest.raises(ConfigError, match=r"art.toml and command line: stepz"):
        from_arguments(parse("--rank", "4"), file)


def test_a_config_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 3


def test_every_kind_of_setting_has_an_option_of_its_kind():
    """A kind that ``add_arguments`` does not know would silently become free text."""
    known = {int, float, str, Path, bool, list}
    for name, field in TrainConfig.model_fields.items():
        kinds = [k for k in typing.get_args(field.annotation) or (field.annotation,) if k is not types.NoneType]
        origin = typing.get_origin(field.annotation)
        assert origin in (typing.Literal, list) or set(kinds) <= known, name
