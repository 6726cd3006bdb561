"""A merged model as one GGUF file: weights, settings, tokenizer and chat template, for llama.cpp and transformers.

Weights keep their precision (float32, float16 or bfloat16: both readers know all three exactly); norms and biases,
which llama.cpp takes in float32 only, are widened, which is exact. The file is written under a temporary name, fsynced
and renamed, and holds no path of this machine.

It refuses, before anything is written, what it cannot express exactly: architectures other than Llama, Qwen 2 and
Qwen 3, settings that llama.cpp does not read for them, and tokenizers other than byte-level BPE that splits text as
GPT-2, SmolLM, Llama 3 or Qwen 2 does. Two limits are those of the readers: transformers reads no Llama 3 rope scaling
from a GGUF file (llama.cpp does), and llama.cpp has no Unicode normalisation (Qwen's NFC): it sees text as it is given.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from art_backends.errors import ConfigError
from art_backends.training.versions import TEMPORARY

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}
# No key of a GGUF file says these, so each reader takes them to be so.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}


def _split(digits: str) -> list[dict[str, Any]]:
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pattern = {"Regex": words + digits + rest}
    return [
        {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]


_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
# How text is cut before merging, by llama.cpp's name for it (tokenizer.ggml.pre); and what else goes with the name.
_CUTS = {"gpt-2": [_GPT2], "smollm": [_DIGITS, _GPT2], "llama-bpe": _split(r"\p{N}{1,3}"), "qwen2": _split(r"\p{N}")}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word that is a token is not merged anew ("ignore_merges")
_NORMALISED = {"qwen2": {"type": "NFC"}}


def check(config: Any, tokenizer: Any) -> None:
    """Raise ConfigError, saying why and what to do instead, if ``write`` could not express this model exactly."""
    problem = _model_problem(config) or _tokenizer_problem(tokenizer, config.vocab_size)
    if problem is not None:
        raise ConfigError(
            f"this base model cannot be exported as GGUF: {problem}. The other way: export it with --merged and turn "
            "that folder into GGUF with llama.cpp's own convert_hf_to_gguf.py"
        )


def write(model: PreTrainedModel, tokenizer: Any, file: Path, name: str) -> None:
    """Write a checked model to ``file``, calling it ``name``. Raises OSError; then nothing of it is left."""
    config: Any = model.config
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture])
    _add_settings(writer, config, name)
    writer.add_file_type(_FILE_TYPES[model.dtype])
    ends = None if model.generation_config is None else model.generation_config.eos_token_id
    _add_tokenizer(writer, tokenizer, config.vocab_size, [ends] if isinstance(ends, int) else ends or [])
    _add_tensors(writer, model, architecture)
    temporary = file.with_name(f"{TEMPORARY}{file.name}")
    try:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.rename(file)
    finally:
        temporary.unlink(missing_ok=True)


def _model_problem(config: Any) -> str | None:
    kind = config.model_type
    if kind not in _ARCHITECTURES:
        return f"its architecture is {kind!r}; supported are {', '.join(_ARCHITECTURES)}"
    for setting, only in _FIXED.items():
        value = getattr(config, setting, None)
        if value not in (only, None):
            return f"its {setting} is {value!r}, and only {only!r} can be said in a GGUF file of a {kind} model"
    rope = config.rope_parameters
    scalings = ("default", "llama3") if kind == "llama" else ("default",)
    if rope.get("rope_type", "default") not in scalings or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rope settings are {rope}; of a {kind} model, rope_type must be {' or '.join(scalings)}"
    if config.dtype not in (None, *_FILE_TYPES):
        return f"its weights are {config.dtype}, not float32, float16 or bfloat16"
    return None


def _tokenizer_problem(tokenizer: Any, rows: int) -> str | None:
    if _cut(tokenizer) is None:
        return f"its tokenizer is no byte-level BPE that cuts text as llama.cpp's {', '.join(_CUTS)} do"
    vocabulary = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:
        return f"its tokenizer has token {max(vocabulary.values())}, but the model only {rows} rows of embeddings"
    for token in tokenizer.added_tokens_decoder.values():
        if token.lstrip or token.rstrip or token.single_word:
            return f"its token {token.content!r} depends on the text around it (lstrip, rstrip or single_word)"
    if tokenizer.eos_token_id is None:  # llama.cpp would take token 11
        return "its tokenizer names no token that ends a text (eos_token)"
    if _added_around(tokenizer) is None:
        return "its tokenizer adds other tokens to a text than one at its beginning (bos) and one at its end (eos)"
    return None


def _cut(tokenizer: Any) -> str | None:
    """llama.cpp's name for how this tokenizer cuts text before it merges, None where there is none."""
    if not tokenizer.is_fast:
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    steps, model = state["pre_tokenizer"] or {}, state["model"]
    if model["type"] != "BPE":
        return None
    steps = [
        {key: value for key, value in step.items() if key != "trim_offsets"}  # offsets are no part of the ids
        for step in steps.get("pretokenizers", [steps])
    ]
    name = next((name for name, known in _CUTS.items() if known == steps), None)
    plain = (
        not any(model[key] for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and model["ignore_merges"] == (name in _WHOLE_WORDS_FIRST)
        and state["normalizer"] in (None, _NORMALISED.get(name or ""))
        # of bytes without a token nothing is left, in llama.cpp too; it puts no unknown token in their place
        and (model["unk_token"] is None or set(ByteLevel.alphabet()) <= model["vocab"].keys())
        and not any(" " in part for merge in model["merges"] for part in merge)  # what parts a merge's halves
    )
    return name if plain else None


def _added_around(tokenizer: Any) -> tuple[bool, bool] | None:
    """Whether the tokenizer begins a text with bos and ends it with eos; None where it adds anything else. Tried out:
    a tokenizer may keep this in several places."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for first in (False, True):
        for last in (False, True):
            if whole == [*[tokenizer.bos_token_id] * first, *bare, *[tokenizer.eos_token_id] * last]:
                return first, last
    return None


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_settings(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, rows: int, ends: list[int]) -> None:
    tokens = [f"[PAD{index}]" for index in range(rows)]  # rows that no token has
    kinds = [gguf.TokenType.UNUSED] * rows
    for text, index in tokenizer.get_vocab().items():
        tokens[index], kinds[index] = text, gguf.TokenType.NORMAL
    for index, token in tokenizer.added_tokens_decoder.items():
        control = token.special or index in tokenizer.all_special_ids
        tokens[index] = token.content
        kinds[index] = gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(str(_cut(tokenizer)))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    # Other ends of an answer than eos go where llama.cpp looks for more; well-known ones it also knows by their text.
    more = [end for end in ends if end != tokenizer.eos_token_id]
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unk": tokenizer.unk_token_id}
    special |= {"pad": tokenizer.pad_token_id, **dict(zip(("eot", "eom"), more, strict=False))}
    for role, index in special.items():
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    first, last = _added_around(tokenizer) or (False, False)
    writer.add_add_bos_token(first)
    writer.add_add_eos_token(last)
    writer.add_chat_template(tokenizer.chat_template)


def _add_tensors(writer: gguf.GGUFWriter, model: PreTrainedModel, architecture: gguf.MODEL_ARCH) -> None:
    config: Any = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = model.state_dict()
    tied = tensors["lm_head.weight"].data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()
    heads = {}
    if architecture is gguf.MODEL_ARCH.LLAMA:
        heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and tied:
            continue  # both readers take the embeddings where there is no output.weight
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise ConfigError(f"this base model cannot be exported as GGUF: the format has no place for its {name}")
        rotated = heads.get(".".join(name.split(".")[-2:]))
        _add_tensor(writer, place, tensor if rotated is None else _in_pairs(tensor, rotated))
    if config.rope_parameters.get("rope_type") == "llama3":
        size = _head_size(config)
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        _add_tensor(writer, "rope_freqs.weight", plain / scaled)  # llama.cpp divides each frequency by its factor


def _in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head in llama.cpp's order for Llama models: it rotates neighbours, transformers the halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 1:
        tensor = tensor.float()
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:  # a type that numpy lacks: its bytes
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())
