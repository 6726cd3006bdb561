"""The door for LangGraph: an unmodified graph is run, captured and trained in place.

    report = art_langgraph.train("my_app:graph", scenarios="tasks.jsonl", reward=score)

It refuses to import torch, the server or the worker: those are other processes.
"""

from art_backends.config import TrainConfig
from art_backends.report import Report
from art_backends.rewards.values import Run

from art_langgraph.providers import delegate
from art_langgraph.train import atrain, train

__all__ = ["Report", "Run", "TrainConfig", "atrain", "delegate", "train"]
