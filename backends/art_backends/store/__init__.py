"""Durable calls, rollouts, steps and tokens in one SQLite file. Import ``Store`` and ``AsyncStore`` from here."""

from art_backends.store.database import ConflictError, NotFoundError
from art_backends.store.forgetting import Forgotten, subject_digest
from art_backends.store.store import Ending, Filters, Store, Token
from art_backends.store.writer import AsyncStore

__all__ = [
    "AsyncStore",
    "ConflictError",
    "Ending",
    "Filters",
    "Forgotten",
    "NotFoundError",
    "Store",
    "Token",
    "subject_digest",
]
