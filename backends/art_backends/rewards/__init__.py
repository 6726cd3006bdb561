"""Rewards: what a reward function gets (``Run``) and may return. It refuses to hold any reward of its own yet."""

from art_backends.rewards.values import Reward, Run

__all__ = ["Reward", "Run"]
