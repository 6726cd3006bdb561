"""LoRA versions that each say one word over and over, so that an answer shows which version gave it.

Rank 1 on the last layer's ``down_proj``: A reads a constant out of the layer's activations (least squares over the very
conversations that will be held, which no adapter on that layer changes), B pushes the residual stream so far towards
one word's embedding that nothing else is left. ``make`` checks both with transformers before a file is written.

It refuses a model without ``model.layers``, and a word that the model's own embeddings do not set apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from art_backends.engines.embedded.render import HERMES_PATH, ChatTemplate
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

POLICY = "policy"
LOOKED_AT = 1500  # of the vocabulary's words, the commonest first
PUSH = 30.0  # how many times the residual stream's own length
MARGIN = 8.0  # nats by which a version's word must lead


def conversations(word: str, turns: Sequence[str], length: int) -> list[list[dict[str, str]]]:
    """What is asked of a version: each turn behind the answers before it, the version's word ``length`` times."""
    found, messages = [], list[dict[str, str]]()
    for turn in turns:
        messages = [*messages, {"role": "user", "content": turn}]
        found.append(messages)
        messages = [*messages, {"role": "assistant", "content": (f" {word}" * length)}]
    return found


def make(model_folder: Path, versions: Path, count: int, turns: Sequence[str], length: int, rank: int = 1) -> list[str]:
    """Write versions 1 … ``count``; their words, that of version 1 first. ValueError if the words do not suffice."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, local_files_only=True).eval()
    words = _words(model, tokenizer)[:count]
    if len(words) < count:
        raise ValueError(f"only {len(words)} of the words are set apart by this model, {count} are needed")
    seen, size = _activations(model, tokenizer, words, turns, length)
    reader = torch.linalg.solve(seen.T @ seen + 1e-3 * torch.eye(seen.shape[1]), seen.T @ torch.ones(len(seen)))
    read = seen @ reader
    if not bool((read > 0.5).all()):
        raise ValueError(
            f"the layer's activations give no constant: {float(read.min()):.2f} to {float(read.max()):.2f}"
        )
    for number, word in enumerate(words, start=1):
        push = _direction(model, _token(tokenizer, word)) * PUSH * size
        write(versions / f"{POLICY}@{number}", model, reader, push, number, rank)
    return words


def write(folder: Path, model: Any, reader: torch.Tensor, push: torch.Tensor, number: int, rank: int = 1) -> None:
    """One version's folder, as the trainer leaves it; more than rank 1 is filled with zeros."""
    layer = model.config.num_hidden_layers - 1
    name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
    a, b = torch.zeros(rank, len(reader)), torch.zeros(len(push), rank)
    a[0], b[:, 0] = reader, push
    folder.mkdir(parents=True)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": ["down_proj"], "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    state = {"format": 1, "policy": POLICY, "version": number, "step": number, "rollout_ids": []}
    (folder / "state.json").write_text(json.dumps(state))


def _token(tokenizer: Any, word: str) -> int:
    ids = tokenizer.encode(f" {word}", add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 else -1


def _direction(model: Any, token: int) -> torch.Tensor:
    """Where the residual stream must point for the final norm and the head to say this token."""
    towards = (model.model.norm.weight * model.lm_head.weight[token]).detach()
    return towards / towards.norm()


def _words(model: Any, tokenizer: Any) -> list[str]:
    """Common words of one token that lead clearly if the residual stream points their way."""
    pieces = ((token, tokenizer.decode([token])) for token in range(model.config.vocab_size))
    words = [(token, piece[1:]) for token, piece in pieces if re.fullmatch(r" [a-z]{4,9}", piece)][:LOOKED_AT]
    found = []
    with torch.no_grad():
        for begin in range(0, len(words), 100):
            some = words[begin : begin + 100]
            towards = torch.stack([_direction(model, token) for token, _ in some])
            best = model.lm_head(model.model.norm(towards)).topk(2)
            for (token, word), values, indices in zip(some, best.values, best.indices, strict=True):
                leads = int(indices[0]) == token and float(values[0] - values[1]) > MARGIN
                if leads and _token(tokenizer, word) == token:
                    found.append(word)
    return found


def _activations(
    model: Any, tokenizer: Any, words: Sequence[str], turns: Sequence[str], length: int
) -> tuple[torch.Tensor, float]:
    """What enters the last ``down_proj`` wherever a word will be sampled, and the residual stream's length there."""
    template = ChatTemplate(tokenizer, HERMES_PATH.read_text(encoding="utf-8"))
    rows: list[torch.Tensor] = []
    size = 0.0
    layer = model.model.layers[-1]
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, given: inputs.append(given[0][0])),
        model.model.norm.register_forward_pre_hook(lambda _, given: outputs.append(given[0][0])),
    ]
    with torch.no_grad():
        for word in words:
            for messages in conversations(word, turns, length):
                prompt = tokenizer.encode(template.render(messages), add_special_tokens=False)
                answer = [_token(tokenizer, word)] * length
                inputs.clear()
                outputs.clear()
                model(input_ids=torch.tensor([[*prompt, *answer]]))
                rows.append(inputs[0][len(prompt) - 1 :])
                size = max(size, float(outputs[0][len(prompt) - 1 :].norm(dim=-1).max()))
    for hook in hooks:
        hook.remove()
    return torch.cat(rows), size
