from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from art_backends.config import TrainConfig
from art_backends.errors import AdapterError
from art_backends.training import adapters, optimizer
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.backends.training.conftest import TARGETS, make_request, rich_batch, tiny_config


@pytest.fixture
def good(make_trainer, tmp_path):
    make_trainer().step(make_request(tmp_path / "versions", rich_batch()))
    return tmp_path / "versions" / "policy@1"


def break_tensors(folder, change):
    path = folder / adapters.WEIGHTS
    tensors = load_file(path)
    path.unlink()
    save_file(change(tensors), path)


def first(tensors, side="A"):
    return next(name for name in sorted(tensors) if f"lora_{side}" in name)


def with_value(value):
    def change(tensors):
        tensors[first(tensors)].view(-1)[3] = value
        return tensors

    return change


def narrower(tensors):
    name = first(tensors)
    return {**tensors, name: tensors[name][:2].contiguous()}


def without(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != first(tensors, "B")}


TENSORS = {
    "NaN": (with_value(float("nan")), "not finite"),
    "infinite": (with_value(float("inf")), "not finite"),
    "wrong rank": (narrower, "not of rank 4"),
    "half a pair": (without, "stands alone"),
    "nothing": (lambda _tensors: {}, "no tensors"),
    "something else": (lambda tensors: {**tensors, "lm_head.weight": torch.zeros(2)}, "unexpected tensor lm_head"),
    "integers": (lambda tensors: {**tensors, first(tensors): tensors[first(tensors)].int()}, "not finite"),
}


@pytest.mark.parametrize("case", list(TENSORS))
def test_bad_tensors_are_refused(case, good):
    change, reason = TENSORS[case]
    break_tensors(good, change)
    with pytest.raises(AdapterError, match=reason):
        adapters.read(good)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(keep, good):
    path = good / adapters.WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(AdapterError, match="truncated"):
        adapters.read(good)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "not a LoRA"),
        ({"r": 0}, "positive integer"),
        ({"r": "4"}, "positive integer"),
        ({"r": 8}, "not of rank 8"),
        ({"lora_alpha": None}, "positive number"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is not supported"),
        ({"bias": "all"}, "bias 'all'"),
    ],
)
def test_a_bad_configuration_is_refused(changes, reason, good):
    path = good / adapters.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AdapterError, match=reason):
        adapters.read(good)


def test_files_that_are_missing_or_pickled(good):
    (good / adapters.WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=r"not there$"):
        adapters.read(good)
    (good / "adapter_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(AdapterError, match="is a pickle and is never loaded"):
        adapters.read(good)
    shutil.rmtree(good)
    with pytest.raises(AdapterError, match="adapter_config"):
        adapters.read(good)


UNPICKLED = """
import pickle, sys
from pathlib import Path
from art_backends.engines.embedded import adapters as engine
from art_backends.errors import AdapterError
from art_backends.training import adapters

def refused(read):
    try:
        read()
    except AdapterError:
        return True
    return False

folder = Path(sys.argv[1])
seen = []
sys.addaudithook(lambda event, _: seen.append(event) if event == "pickle.find_class" else None)
pickle.loads(pickle.dumps(Path))
assert seen.pop(), "the hook sees what is unpickled"
adapters.read(folder)
assert refused(lambda: engine.read(folder, {})), "no module of this model"
(folder / "adapter_model.safetensors").unlink()
assert refused(lambda: adapters.read(folder))
assert refused(lambda: engine.read(folder, {}))
assert not seen, seen
"""


def test_no_pickle_in_an_adapters_folder_is_ever_opened(good):
    """Row S11: under an audit hook, with what would run code beside the weights and in their place."""

    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    for name in ("adapter_model.bin", "optimizer.pt", "training_args.bin", "state.pkl"):
        (good / name).write_bytes(pickle.dumps(Evil()))
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLED, str(good)], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_the_base_model_is_compared(good):
    assert adapters.read(good, base_digest="digest").scale == 2.0
    with pytest.raises(AdapterError, match="another base model"):
        adapters.read(good, base_digest="other")
    (good / "state.json").unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        adapters.read(good, base_digest="digest")


@pytest.mark.parametrize(
    ("base", "config", "reason"),
    [
        ({}, {"rank": 8}, "rank 4"),
        ({}, {"alpha": 4.0}, "alpha 8"),
        ({}, {"target_modules": ["q_proj"]}, "does not fit the model's target_modules"),
        ({"num_hidden_layers": 1}, {}, "does not fit"),
        ({"hidden_size": 64}, {}, "another base model"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(base, config, reason, good):
    settings = TrainConfig(**{"rank": 4, "alpha": 8.0, "target_modules": TARGETS, **config})
    model = adapters.attach(LlamaForCausalLM(tiny_config(**base)), settings)
    with pytest.raises(AdapterError, match=reason):
        adapters.put(model, adapters.read(good), settings)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_peft_loads_what_was_written_and_gives_the_same_logits(good, make_trainer, model_path, tmp_path):
    trainer = make_trainer()
    request = make_request(tmp_path / "versions", rich_batch(), 1)
    mine = trainer._load(request).model
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model_path), good)
    plain = LlamaForCausalLM.from_pretrained(model_path)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(mine(input_ids=ids).logits, theirs(input_ids=ids).logits)
        assert not torch.allclose(mine(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4)
        with adapters.disabled(mine):
            torch.testing.assert_close(mine(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_the_configuration_names_no_local_path(good, model_path):
    assert str(model_path) not in (good / adapters.CONFIG).read_text()


def test_a_fresh_adapter_is_the_base_model_and_depends_on_the_seed_only():
    def fresh(seed):
        torch.manual_seed(99)
        base = LlamaForCausalLM(tiny_config())
        torch.manual_seed(seed + 1000)
        model = adapters.attach(base, TrainConfig(rank=4, target_modules=TARGETS))
        adapters.initialise(model, seed)
        return adapters.parameters(model)

    first_one, same, other = fresh(1), fresh(1), fresh(2)
    assert all(torch.equal(first_one[name], same[name]) for name in first_one)
    assert not torch.equal(first_one[first(first_one)], other[first(other)])
    assert all(not item.any() for name, item in first_one.items() if "lora_B" in name)
    assert all(item.any() for name, item in first_one.items() if "lora_A" in name)


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "sgd"])
def test_optimizer_state_survives_byte_for_byte(kind, tmp_path, make_trainer):
    """A trainer that goes on and one that was started anew make the same third version."""
    for folder, anew in ((tmp_path / "one", False), (tmp_path / "two", True)):
        trainer = make_trainer(folder)
        for version in range(3):
            if anew:
                trainer = make_trainer(folder)
            trainer.step(make_request(folder, rich_batch(), version, optimizer=kind))
    for name in (optimizer.FILE, "adapter_model.safetensors"):
        assert (tmp_path / "one/policy@3" / name).read_bytes() == (tmp_path / "two/policy@3" / name).read_bytes()
    assert load_file(tmp_path / "one/policy@3" / optimizer.FILE)


def test_another_optimizer_than_the_run_began_with_is_refused(good, make_trainer, tmp_path):
    with pytest.raises(AdapterError, match="another optimizer than sgd"):
        make_trainer()._load(make_request(tmp_path / "versions", rich_batch(), 1, optimizer="sgd"))


def test_another_scale_than_the_run_began_with_is_refused(good, make_trainer, tmp_path):
    with pytest.raises(AdapterError, match="rslora False, the configuration 4, 8, True"):
        make_trainer()._load(make_request(tmp_path / "versions", rich_batch(), 1, rslora=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(".step")}, "of another adapter"),
        (lambda tensors: {n: t * float("nan") for n, t in tensors.items()}, "not finite"),
        (lambda tensors: {n: t[:1].contiguous() if t.ndim else t for n, t in tensors.items()}, "wrong shape"),
    ],
)
def test_a_bad_optimizer_state_is_refused(change, reason, good, make_trainer, tmp_path):
    path = good / optimizer.FILE
    tensors = load_file(path)
    path.unlink()
    save_file(change(tensors), path)
    with pytest.raises(AdapterError, match=reason):
        make_trainer()._load(make_request(tmp_path / "versions", rich_batch(), 1))
    path.write_bytes(b"short")
    with pytest.raises(AdapterError, match="cannot be read"):
        make_trainer()._load(make_request(tmp_path / "versions", rich_batch(), 1))
