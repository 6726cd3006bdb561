"""The door for LangGraph: an unmodified graph is run, captured and trained in place.

It refuses to import torch, the server or the worker: those are other processes.
"""
