"""The settings of the quickstart's training, for the demo and for benchmarks/learning.py alike."""

SETTINGS = {
    "name": "quickstart",
    "models": ["gpt-4o-mini"],
    "groups_per_step": 4,
    "group_size": 8,
    "shuffle": False,  # the questions ask for the four tools in turn: each step has one of each
    "dynamic_sampling": 2,  # groups in the place of those whose rewards are all equal
    "learning_rate": 1e-3,
    "temperature": 0.7,  # so small a model finds little that is worth rewarding at 1
    "scale_rewards": True,
    # Of sampled answers; the likeliest ones are right more often. Above three quarters: else a run may end with one of
    # the four tools never used rightly.
    "target_success": 0.8,
    "target_steps": 3,
}
