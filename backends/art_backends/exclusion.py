"""Why an answer must not train.

It goes by evidence in the record of a call alone, so that the trainer and whoever shows a rollout say the same. It
refuses to leave out a call because another one has the same prompt: self-consistency and parallel branches do that on
purpose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice

TOKEN_LIMIT = 2**31


def exclusion(call: Call, choice: Choice, limit: int = TOKEN_LIMIT, nodes: Collection[str] = ()) -> str | None:
    """Why this answer must not train, in a word, or None.

    ``limit``: number of token ids that the model knows; ``nodes``: those whose answers train (empty: all).
    """
    sampling = call.sampling
    sampled = choice.token_ids
    checks = (
        (call.status is not CallStatus.OK, call.status.value),
        (call.excluded is not None, call.excluded),
        (call.capture is not CaptureLevel.TOKENS, "capture"),
        (sampling.constrained, "constrained"),
        (sampling.top_p < 1 or sampling.top_k > 0, "truncated_sampling"),
        (not sampling.temperature > 0, "greedy"),
        (not sampled, "empty"),
        (not call.prompt_token_ids, "no_prompt"),
        (len(sampled) != len(choice.logprobs), "logprob_mismatch"),
        (not all(math.isfinite(value) for value in choice.logprobs), "logprob_not_finite"),
        (not _known(call.prompt_token_ids, limit) or not _known(sampled, limit), "unknown_token"),
        (not call.node.within(nodes), "other_node"),
    )
    return next((reason for failed, reason in checks if failed), None)


def _known(ids: Sequence[int], limit: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < limit)
