"""The adapter that a run begins from: what cannot be used is said before anything is made."""

import json
from pathlib import Path

import pytest
from art_backends.config import TrainConfig
from art_backends.errors import ConfigError
from art_backends.server import origin
from art_backends.training import versions

MODULES = TrainConfig().target_modules


def adapter(path: Path, **settings) -> Path:
    path.mkdir(parents=True)
    given = {"r": 2, "lora_alpha": 4.0, "target_modules": MODULES, "use_rslora": False, **settings}
    (path / versions.ADAPTER_CONFIG).write_text(json.dumps(given))
    (path / versions.ADAPTER_WEIGHTS).write_bytes(b"weights")
    (path / versions.STATE).write_text(json.dumps({"base_digest": "abc"}))
    return path


def config(source: Path, **settings) -> TrainConfig:
    return TrainConfig(init_adapter=source, **{"rank": 2, "alpha": 4.0, **settings})


def test_an_adapter_is_copied_once(tmp_path):
    given = config(adapter(tmp_path / "a@1"))
    folder = tmp_path / "versions"
    folder.mkdir()
    assert origin.check(given, folder) == tmp_path / "a@1"
    origin.place(given, folder, "abc")
    assert (folder / "policy@0" / versions.ADAPTER_WEIGHTS).read_bytes() == b"weights"
    (tmp_path / "a@1" / versions.ADAPTER_CONFIG).unlink()  # not needed any more
    assert origin.check(given, folder) is None
    origin.place(given, folder, "abc")
    assert origin.check(TrainConfig(), folder) is None


def test_other_settings_are_said_at_once_with_the_options_that_help(tmp_path):
    source = adapter(tmp_path / "a@1", use_rslora=True, target_modules=["q_proj", "k_proj"])
    with pytest.raises(ConfigError) as caught:
        origin.check(config(source, rank=8), tmp_path / "versions")
    said = str(caught.value)
    assert f"rank: the adapter {source} has 2, this run 8" in said
    assert said.endswith("use the adapter's: --rank 2 --rslora --target-modules k_proj q_proj")


def test_an_adapter_that_is_not_there_is_said_with_those_beside_it(tmp_path):
    adapter(tmp_path / "taught@1")
    adapter(tmp_path / "taught@2")
    with pytest.raises(ConfigError, match=r"there is no folder .*taught@3; beside it are: taught@1, taught@2$"):
        origin.check(config(tmp_path / "taught@3"), tmp_path / "versions")
    (tmp_path / "taught@1" / versions.ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        origin.check(config(tmp_path / "taught@1"), tmp_path / "versions")


def test_an_adapter_of_another_base_model(tmp_path):
    given = config(adapter(tmp_path / "a@1"))
    assert origin.check(given, tmp_path / "versions") is not None  # not known yet
    with pytest.raises(ConfigError, match="was trained on another base model"):
        origin.check(given, tmp_path / "versions", "other")
