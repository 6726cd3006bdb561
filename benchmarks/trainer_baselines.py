"""What the trainer is compared with: transformers + peft on padded rows, and TRL's GRPO step on the same rollouts.

A *row* is token ids and the spans of them that train, each with its advantage over Z. It refuses to be clever: rows are
padded to the longest of their micro-batch, four or, if they are long, fewer at a time, as people do it by hand.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from art_backends.training import advantages, sequences

MICRO_BATCH = 4  # rows
MICRO_TOKENS = 4096  # padded: float32 logits of 49,152 ids, their softmax and its gradient take 2.4 GB


@dataclass(frozen=True)
class Row:
    """Token ids; ``spans``: (first trained position, end, weight of each token in the loss)."""

    tokens: list[int]
    spans: list[tuple[int, int, float]]


def row_per_call(samples: Sequence[sequences.Sample], plan: advantages.Plan) -> list[Row]:
    """One row per call: its whole prompt and what was sampled."""
    return [Row(sample.tokens.tolist(), [_span(sample, plan)]) for sample in samples]


def row_per_rollout(samples: Sequence[sequences.Sample], plan: advantages.Plan) -> list[Row]:
    """One row per branch: calls that follow each other share it."""
    return [
        Row(branch[-1].tokens.tolist(), [_span(sample, plan) for sample in branch])
        for branch in sequences.branches(samples)
    ]


def _span(sample: sequences.Sample, plan: advantages.Plan) -> tuple[int, int, float]:
    return sample.start, len(sample.tokens), float(plan.of(sample) * plan.weight[sample.rollout_id])


def micro_batches(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of like length, as many at a time as the logits of all their positions leave memory for, four at most."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        last = batches[-1] if batches else []
        if not last or len(last) == MICRO_BATCH or (len(last) + 1) * len(row.tokens) > MICRO_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def padded_tokens(batches: Sequence[Sequence[Row]]) -> int:
    """Positions that are computed."""
    return sum(len(batch) * max(len(row.tokens) for row in batch) for batch in batches)


def plain_step(model: Any, batches: Sequence[Sequence[Row]]) -> None:
    """Forward and backward of the policy gradient, logits at every position."""
    for batch in batches:
        width = max(len(row.tokens) for row in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        weight = torch.zeros(len(batch), width - 1)
        for number, row in enumerate(batch):
            ids[number, : len(row.tokens)] = torch.tensor(row.tokens)
            mask[number, : len(row.tokens)] = 1
            for first, end, value in row.spans:
                weight[number, first - 1 : end - 1] = value
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = torch.exp(logprobs - logprobs.detach())
        (-(ratio * weight)).sum().backward()


def has_trl() -> bool:
    """TRL's trainer needs ``datasets``, which is not among this project's packages."""
    return all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets", "accelerate"))


class TrlStep:
    """``GRPOTrainer.compute_loss`` and its backward pass on rows that were sampled elsewhere."""

    def __init__(self, model: Any) -> None:
        from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415 - optional
        from tokenizers import Tokenizer, models  # noqa: PLC0415
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
        from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

        self._folder = tempfile.TemporaryDirectory()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
        )
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=GRPOConfig(
                output_dir=self._folder.name,
                per_device_train_batch_size=MICRO_BATCH,
                num_generations=2,
                loss_type="bnpo",
                gradient_checkpointing=False,  # as in the others
                bf16=False,
                use_cpu=True,
                report_to=[],
            ),
            train_dataset=Dataset.from_list([{"prompt": "-"}] * MICRO_BATCH),
            processing_class=tokenizer,
        )
        self.trainer.model.eval()

    def run(self, batches: Sequence[Sequence[Row]]) -> None:
        """Prompts padded on the left, what follows on the right, tokens of tools masked: TRL's own layout."""
        for batch in batches:
            starts = [row.spans[0][0] for row in batch]
            left, right = max(starts), max(len(row.tokens) - start for row, start in zip(batch, starts, strict=True))
            prompt = torch.zeros(len(batch), left, dtype=torch.int64)
            completion = torch.zeros(len(batch), right, dtype=torch.int64)
            prompt_mask, completion_mask = torch.zeros_like(prompt), torch.zeros_like(completion)
            tool_mask = torch.zeros_like(completion)
            for number, (row, start) in enumerate(zip(batch, starts, strict=True)):
                prompt[number, left - start :] = torch.tensor(row.tokens[:start])
                prompt_mask[number, left - start :] = 1
                completion[number, : len(row.tokens) - start] = torch.tensor(row.tokens[start:])
                completion_mask[number, : len(row.tokens) - start] = 1
                for first, end, _ in row.spans:
                    tool_mask[number, first - start : end - start] = 1
            loss = self.trainer.compute_loss(
                self.trainer.model,
                {
                    "prompt_ids": prompt,
                    "prompt_mask": prompt_mask,
                    "completion_ids": completion,
                    "completion_mask": completion_mask,
                    "tool_mask": tool_mask,
                    "advantages": torch.tensor([row.spans[0][2] for row in batch]),
                },
            )
            loss.backward()
