import argparse
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from art_backends.config import FILE_ONLY, TrainConfig, add_arguments, from_arguments, load_toml, make_config
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
    "max_sampler_kl": 0.1,
    "engine": "vllm",
    "engine_url": ["http://127.0.0.1:8000", "http://10.0.0.2:8000/one"],
    "vllm": "uvx --from vllm vllm serve",
    "vllm_args": "--gpu-memory-utilization 0.5",
    "vllm_sleep": True,
    "device": "cpu",
    "dtype": "bfloat16",
    "threads": 1,
    "max_model_len": 2048,
}

# Not all at once: these are for a vLLM that is started, engine_url is for others.
STARTED = {"vllm", "vllm_args", "vllm_sleep"}
TOGETHER = [{name: OTHER[name] for name in OTHER if name not in left_out} for left_out in (STARTED, {"engine_url"})]


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
    assert set(OTHER) == set(TrainConfig.model_fields) - FILE_ONLY
    default = TrainConfig()
    assert [name for name, value in OTHER.items() if getattr(default, name) == value] == []


@pytest.mark.parametrize("values", TOGETHER)
def test_python_flags_and_toml_are_the_same(values, tmp_path):
    file = tmp_path / "art.toml"
    wanted = TrainConfig(**values)
    assert from_arguments(parse(*flags(values))) == wanted
    for table in ("", "[art]"):
        file.write_text(toml(values, table))
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
    left = add_arguments(parser, only={"steps", "scale_rewards"})
    assert "--seed" not in parser.format_help()
    assert "--steps" in parser.format_help()
    assert "--seed" in left
    assert len(left) == len(TrainConfig.model_fields) - 2


def test_help_has_every_description_and_default():
    parser = argparse.ArgumentParser(prog="x", exit_on_error=False)
    add_arguments(parser)
    said = " ".join(parser.format_help().split())
    for name, field in TrainConfig.model_fields.items():
        assert field.description, f"{name} has no description"
        assert (f"--{name.replace('_', '-')} " in said) is (name not in FILE_ONLY)
    assert "linear modules that get an adapter" in said
    assert "(default: 0.001)" in said
    assert "(default: q_proj k_proj" in said
    assert "--scale-rewards, --no-scale-rewards divide advantages" in said
    for nothing in ("default: None", "default: []", "default: False", "==SUPPRESS=="):
        assert nothing not in said
    for option in said.split(" --"):
        assert option.count("(default") <= 1, option


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"group_size": 1}, "group_size must be at least 2, not 1$"),
        ({"group_sizes": 4}, r"there is no setting group_sizes; did you mean group_size\?$"),
        ({"group-size": 4}, r"there is no setting group-size; did you mean group_size\?$"),
        ({"x": 4}, "there is no setting x$"),
        ({"rank": "many"}, "rank must be a whole number, not 'many'$"),
        ({"rank": 2.5}, "rank must be a whole number, not 2.5$"),
        ({"rank": [2]}, r"rank must be a whole number, not \[2\]$"),
        ({"steps": 100_001}, "steps must be at most 100000, not 100001$"),
        ({"alpha": "big"}, "alpha must be a number, not 'big'$"),
        ({"alpha": None}, "alpha must be a number, not None$"),
        ({"alpha": 0}, "alpha must be more than 0, not 0$"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number, not nan$"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number, not inf$"),
        ({"rollout_timeout": float("inf")}, "rollout_timeout must be a finite number, not inf$"),
        ({"name": "../up"}, "name must be 1 to 64 letters, .*, not '../up'$"),
        ({"base_model": 5}, "base_model must be text, not 5$"),
        ({"folder": 5}, "folder must be a path, not 5$"),
        ({"models": "gpt"}, "models must be a list of names, not 'gpt'$"),
        ({"models": ["gpt", 4]}, "every item of models must be text, not 4$"),
        ({"rslora": "maybe"}, "rslora must be true or false, not 'maybe'$"),
        ({"rslora": [1]}, r"rslora must be true or false, not \[1\]$"),
        ({"history": "none"}, "history must be 'exact' or 'template', not 'none'$"),
        ({"schedule": "cosin"}, r"schedule must be 'constant', .*, not 'cosin'; did you mean cosine\?$"),
        ({"target_modules": []}, "target_modules is empty: name at least one linear module"),
        ({"epsilon_low": 1.0}, "epsilon_low must be less than 1, not 1.0$"),
        ({"engine": "vlm"}, r"engine must be 'embedded' or 'vllm', not 'vlm'; did you mean vllm\?$"),
        (
            {"engine": "embedded", "engine_url": ["http://a:1"]},
            "engine_url names vLLM servers, and engine is embedded: leave one of them out$",
        ),
        ({"engine_url": ["127.0.0.1:8000"]}, "every item of engine_url must be an address such as https://"),
        (
            {"engine_url": ["http://me:secret@a"]},
            "every item of engine_url must be an address .*, without a user, .*, not what was given$",
        ),
        ({"engine_url": ["http://a:1", "http://a:1"]}, "engine_url names a server twice$"),
        ({"engine_url": ["http://a:1"], "vllm_sleep": True}, "engine_url names servers that run already: "),
        ({"vllm_args": "--a 'b"}, "vllm_args cannot be taken apart: No closing quotation$"),
        ({"target_success": 1.5}, "target_success must be at most 1, not 1.5$"),
    ],
)
def test_what_is_wrong_is_named(values, words):
    with pytest.raises(ConfigError, match=f"^here: {words}"):
        make_config(values, source="here")


def test_no_wrong_value_is_told_in_words_of_pydantics():
    """Whatever kind of value a setting is given: the sentence is ours, not the one for errors that are not known."""
    for name in TrainConfig.model_fields:
        for value in (None, "?", b"\xff", 2.5, -1, 10**400, object(), [None], {"a": 1}):
            try:
                make_config({name: value})
            except ConfigError as error:
                said = str(error)
                assert re.search(rf"{name}(\.\d+)? must be |there is no setting {name}\.a", said), said
                assert len(said) < 300


def test_tables_stand_in_a_file(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[art]\nsteps = 3\n[art.limits]\nconcurrency = 9\n[[art.providers]]\nname = "open"\nurl = "https://host/v1"\n'
    )
    found = from_arguments(parse("--steps", "4"), tmp_path / "a.toml")
    assert (found.steps, found.limits.concurrency, found.limits.queue) == (4, 9, 1024)
    assert [(item.name, item.models, item.format) for item in found.providers] == [("open", ["*"], "openai")]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"limits": 3}, "limits must be a table, not 3$"),
        ({"limits": {"n": 0}}, r"limits\.n must be at least 1, not 0$"),
        ({"limits": {"calls": 1}}, r"there is no setting limits\.calls"),
        ({"providers": {}}, "providers must be a list of tables, not {}$"),
        ({"providers": ["x"]}, r"providers\.0 must be a table, not 'x'$"),
        ({"providers": [{"url": "http://host"}]}, r"providers\.0\.name is missing$"),
        ({"providers": [{"name": "x", "url": "file:///etc"}]}, r"providers\.0\.url must be an address such as https:"),
        ({"providers": [{"name": "x", "url": "http://me:secret@host"}]}, r"providers\.0\.url must be an address"),
        ({"providers": [{"name": "x", "url": "http://host", "format": "x"}]}, r"providers\.0\.format must be 'openai'"),
    ],
)
def test_what_is_wrong_in_a_table_is_told_with_its_place(values, words):
    with pytest.raises(ConfigError, match=f"^configuration: {words}"):
        make_config(values)


def test_two_wrong_settings_are_both_named():
    with pytest.raises(ConfigError, match=r"^configuration: steps must .*; rank must "):
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
    with pytest.raises(ConfigError) as caught:
        from_arguments(parse("--rank", "4"), file)
    assert str(caught.value) == f"{file}: there is no setting stepz; did you mean steps?"


def test_a_wrong_value_of_the_command_line_names_the_option(tmp_path):
    file = tmp_path / "art.toml"
    file.write_text("rank = 0\n")
    with pytest.raises(ConfigError) as caught:
        from_arguments(parse("--group-size", "1"), file)
    assert str(caught.value) == f"--group-size must be at least 2, not 1; {file}: rank must be at least 1, not 0"
    with pytest.raises(ConfigError, match=r"^--steps must be a whole number, not 'many'$"):
        from_arguments(parse("--steps", "many"))


def test_settings_that_do_not_fit_each_other_name_where_they_are_from(tmp_path):
    file = tmp_path / "art.toml"
    file.write_text("overlap = true\n")
    with pytest.raises(ConfigError, match=r"^command line: overlap needs a max_staleness"):
        from_arguments(parse("--overlap", "--max-staleness", "0"))
    with pytest.raises(ConfigError, match=f"^{file} and command line: overlap needs a max_staleness"):
        from_arguments(parse("--max-staleness", "0"), file)
    file.write_text("overlap = true\nmax_staleness = 0\n")
    with pytest.raises(ConfigError, match=f"^{file}: overlap needs a max_staleness"):
        from_arguments(parse(), file)


def test_a_config_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 3


def test_every_kind_of_setting_has_an_option_of_its_kind():
    """A kind that ``add_arguments`` does not know would silently become free text."""
    known = {int, float, str, Path, bool, list}
    for name, field in TrainConfig.model_fields.items():
        kinds = [k for k in typing.get_args(field.annotation) or (field.annotation,) if k is not types.NoneType]
        origin = typing.get_origin(field.annotation)
        assert name in FILE_ONLY or origin in (typing.Literal, list) or set(kinds) <= known, name


def test_another_tools_table_is_told(tmp_path):
    (tmp_path / "a.toml").write_text("[tool.art]\nrank = 3\n")
    with pytest.raises(ConfigError, match=r"in a table \[art\], not in \[tool\.art\]"):
        load_toml(tmp_path / "a.toml")


def test_addresses_say_which_engine_it_is():
    for given in (["http://a:1", "http://b:2"], ["http://a:1,http://b:2"], "http://a:1, http://b:2"):
        config = make_config({"engine_url": given})
        assert (config.engine, config.engine_url) == ("vllm", ["http://a:1", "http://b:2"])
    assert from_arguments(parse("--engine-url", "http://a:1,http://b:2")) == config
    assert make_config(config.model_dump(mode="json")) == config
    assert TrainConfig(engine_url=[]).engine == "embedded"
