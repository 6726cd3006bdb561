"""Turn a GGUF file into a folder that transformers loads: safetensors, config, tokenizer.

Done once per base model; the quantised weights are expanded to float32, which holds every quantised value exactly.
It refuses to choose where the file comes from (see ``art_backends.models``).
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers


def gguf_to_safetensors(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of ``gguf`` into ``folder`` (which exists)."""
    arguments = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **arguments)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
        **arguments,
    )
    model.config._name_or_path = ""  # no path of this machine in the files
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
