"""What ends a run early, in words that say what came back and what helps.

A reward that fails for everyone, an agent of which nothing can be learned, steps without a spread. It refuses to
decide about single rollouts: those are excluded and counted by whoever plays them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from art_backends.errors import NothingToLearnError, RewardError, ServerError
from art_backends.rollouts import Control, control
from art_backends.summary import Row, common_error, scored
from art_backends.trajectories import NODE_PART, Call, CallStatus, Rollout

HELPS = (
    "What helps: a reward with parts for what is half right; scenarios of mixed difficulty, easier ones if all fail "
    "and harder ones if all succeed; a larger --group-size; a higher --temperature; a worked example in the agent's "
    "prompt"
)
SAMPLE = 8  # rollouts whose calls are looked at to see whether the agent can be trained


def rewards(rollouts: Sequence[Rollout], where: str, folder: Path) -> None:
    """Raise if not one rollout has a reward: RewardError if the reward is why, else ServerError."""
    if not rollouts or scored(rollouts):
        return
    failed = [rollout for rollout in rollouts if (rollout.fault or "").startswith("reward:")]
    if failed:
        raise RewardError(
            f"{where}: the reward function failed for every rollout it was asked about ({len(failed)}): it "
            f"{fault(failed).removeprefix('reward: ')}"
        )
    raise ServerError(f"{where}: no rollout came through: {fault(rollouts)}; see logs/ in {folder}")


async def calls(client: Control, rollouts: Sequence[Rollout], nodes: Sequence[str] = ()) -> bool:
    """Whether a call that can be trained was seen; NothingToLearnError if none was made, none by ``nodes`` (if any are
    named), or all under a grammar."""
    counted = scored(rollouts)
    if not counted:
        return False
    made = await _made(client, counted)
    if not made:
        raise NothingToLearnError(_no_calls(counted))
    meant = [call for call in made if call.node.within(nodes)]
    if not meant:
        found = sorted({"/".join(call.node.path) or "none" for call in made})
        raise NothingToLearnError(
            f"nothing to learn from: no model call came from {', '.join(nodes)} (nodes); calls came from: "
            f"{', '.join(found)}"
        )
    answered = [call for call in meant if call.status == CallStatus.OK]
    if answered and all(call.sampling.constrained for call in answered):
        raise NothingToLearnError(
            "nothing to learn from: every model call of the agent is constrained by a grammar (response_format, "
            "with_structured_output, or a forced tool_choice), so its token probabilities are not the model's own. "
            "What helps: tool_choice='auto', or free text that the agent parses itself"
        )
    return bool(answered)


async def node_rewards(client: Control, rollouts: Sequence[Rollout]) -> str | None:
    """What is odd about rewards of single nodes: that no call came from a node so named. None if nothing is."""
    counted = scored(rollouts)
    given = {
        part.removeprefix(NODE_PART) for rollout in counted for part in rollout.metrics if part.startswith(NODE_PART)
    }
    if not given:
        return None
    made = await _made(client, counted)
    unknown = sorted(name for name in given if not any(call.node.within([name]) for call in made))
    if not unknown:
        return None
    found = ", ".join(sorted({"/".join(call.node.path) or "none" for call in made})) or "none"
    parts = ", ".join(NODE_PART + name for name in unknown)
    return f"the reward has {parts}, and no call came from such a node; calls came from: {found}"


async def _made(client: Control, counted: Sequence[Rollout]) -> list[Call]:
    """The calls of some rollouts, those that did not fail first."""
    chosen = sorted(counted, key=lambda rollout: rollout.error is not None)[:SAMPLE]
    return [call for rollout in chosen for call in (await control(client.rollout(rollout.id))).calls]


def nothing(row: Row, skipped: int, failing: str | None) -> NothingToLearnError:
    """The error for ``skipped`` steps in a row without a spread; ``row`` is the last one's, ``failing`` the error with
    which the agent failed in all its rollouts, if it did."""
    failed = "" if failing is None else f"The agent failed in all its rollouts: {failing}. "
    steps = "1 step" if skipped == 1 else f"{skipped} steps in a row"
    return NothingToLearnError(
        f"nothing to learn from: in {steps} no group of rollouts had a spread of rewards "
        f"({row.get('reason') or 'all rewards of a group were equal'}). Rewards of the last step: {row['rewards']}. "
        f"{failed}{HELPS}"
    )


def fault(rollouts: Sequence[Rollout]) -> str:
    """The most frequent fault, with its count and how many other kinds there were."""
    counts = Counter(rollout.fault for rollout in rollouts if rollout.fault is not None)
    text, number = counts.most_common(1)[0]
    return f"{text} (×{number})" + (f", and {len(counts) - 1} other kinds" if len(counts) > 1 else "")


def _no_calls(rollouts: Sequence[Rollout]) -> str:
    failed = [rollout.error for rollout in rollouts if rollout.error is not None]
    if len(failed) < len(rollouts):
        return (
            "nothing to learn from: the agent made no model call that was captured. Its calls must go through the "
            "openai SDK (ChatOpenAI does), in its own process, and to a model name in --models if that is set"
        )
    trace = failed[0].traceback or ""
    return (
        f"nothing to learn from: the agent failed before its first model call in every rollout: "
        f"{common_error(rollouts)}\n{trace}".rstrip()
    )
