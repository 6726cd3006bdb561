"""``python -m art_backends.worker.merge``: an adapter version merged into its base model, as a folder of its own.

Weights are merged in float32 and stored in the base's precision, as safetensors or as one GGUF file, with the tokenizer
and the chat template that the run was served with. Says in one JSON line on standard output whether it worked. It
refuses a base model with other weights than the adapter was trained on, and what GGUF cannot express (see
``gguf_export``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers

from art_backends.engines.embedded.adapters import read
from art_backends.engines.embedded.convert import gguf_to_safetensors
from art_backends.engines.embedded.render import ChatTemplate
from art_backends.engines.embedded.weights import load_base
from art_backends.errors import AdapterError, ArtError
from art_backends.models import resolve
from art_backends.worker import gguf_export


def main() -> int:
    """Merge as the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m art_backends.worker.merge")
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--digest", required=True, help="of the base model's weights")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--gguf", metavar="NAME", help="write NAME.gguf instead of safetensors")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        template = None if options.chat_template is None else options.chat_template.read_text()
        merge(options.base_model, options.digest, options.adapter, options.out, template, gguf=options.gguf)
    except (ArtError, OSError) as error:
        sys.stdout.write(json.dumps({"type": type(error).__name__, "message": str(error)}) + "\n")
        return 3
    sys.stdout.write("{}\n")
    return 0


def merge(
    base_model: str, digest: str, adapter: Path, out: Path, template: str | None = None, *, gguf: str | None = None
) -> None:
    """Write base + adapter to the folder ``out``; as the file ``gguf``.gguf if that is given. Raises ArtError or
    OSError."""
    base = resolve(base_model, gguf_to_safetensors)
    if base.digest != digest:
        raise AdapterError(
            f"{base.path}: these are other weights (digest {base.digest[:12]}…) than {adapter.name} was trained on "
            f"({digest[:12]}…)"
        )
    config = transformers.AutoConfig.from_pretrained(base.path, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base.path, local_files_only=True, trust_remote_code=False)
    tokenizer.chat_template = ChatTemplate(tokenizer, template).source
    if gguf is not None:
        gguf_export.check(config, tokenizer)
    model = load_base(base.path, dtype=torch.float32, device="cpu")
    linears = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    shapes = {name: (module.out_features, module.in_features) for name, module in linears.items()}
    with torch.no_grad():
        for name, delta in read(adapter, shapes).items():
            linears[name].weight.addmm_(delta.b.float(), delta.a.float(), alpha=delta.scale)
    stored = getattr(config, "dtype", None)
    if isinstance(stored, torch.dtype):
        torch.nn.Module.to(model, stored)
    if gguf is not None:
        gguf_export.write(model, tokenizer, out / f"{gguf}.gguf", gguf)
        return
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    for file in out.glob("*.safetensors"):  # written for this user alone; an export is to be given away
        shutil.copymode(out / "config.json", file)


if __name__ == "__main__":
    raise SystemExit(main())
