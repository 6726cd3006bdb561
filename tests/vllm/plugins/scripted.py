"""A logits processor for vLLM that lets a test say the model's words: ``vllm_xargs: {"words": [token ids]}``.

All that surrounds them stays vLLM's: rendering, sampling, detokenising, parsing, streaming. Behind the last word comes
whatever the model says. vLLM imports this file in its own environment.
"""

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class Scripted(LogitsProcessor):
    """Leaves one token possible in each row that has words left."""

    def __init__(self, vllm_config, device, is_pin_memory) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}  # row → words, what was sampled so far (it grows)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            words = (params.extra_args or {}).get("words")
            self._rows.pop(index, None)
            if words:
                self._rows[index] = ([int(word) for word in words], output)
        for one, other, direction in batch_update.moved:
            moved, back = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if back is not None and direction is MoveDirectionality.SWAP:
                self._rows[one] = back

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (words, output) in self._rows.items():
            if len(output) < len(words):
                word = words[len(output)]
                kept = logits[index, word].clone()
                logits[index] = float("-inf")
                logits[index, word] = kept
        return logits
