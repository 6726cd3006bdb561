"""From samples to packs: the rectangles of tokens that one forward and backward pass computes.

A *tree pack* is one row holding a piece of the batch's prefix forest: each distinct token once, its depth as position
id, its parent's index beside it (from which follows what it sees). Groups share what their samples share: a system
prompt stands there once. A *plain pack* is one row per branch, padded on the right, for models that cannot be taught
the tree. Both ask for the same logprobs: *queries* (where, which token, at
which temperature) and *occurrences* (in which sample, with which recorded logprob).

Numpy only. It refuses to cut a sequence: one that is longer than the budget makes a pack of its own, since a token
without its context would be another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from art_backends.training.sequences import Floats, Ints, Sample, SequenceGroup, branches, forest, shared


@dataclass(frozen=True)
class Pack:
    """One forward pass.

    ``input_ids``, ``position_ids``: [rows, length]. ``parents``: [length], −1 at a root, for a tree pack (rows = 1);
    None for a plain one, whose ``lengths`` [rows] say where padding begins. ``tokens``: tokens without padding.

    Queries, [Q]: ``query_at`` is the flat index (row · length + column) of the token whose logits predict
    ``query_token``. Occurrences, [M]: ``occurrence_query`` points into the queries, ``occurrence_sample`` into the
    pack's ``samples``, ``occurrence_logprob`` is the sampler's. All sampled tokens of a sample stand in one pack.
    """

    input_ids: Ints
    position_ids: Ints
    parents: Ints | None
    lengths: Ints
    tokens: int
    query_at: Ints
    query_token: Ints
    query_temperature: Floats
    occurrence_query: Ints
    occurrence_sample: Ints
    occurrence_logprob: Floats
    samples: tuple[Sample, ...]

    def ancestors(self) -> npt.NDArray[np.bool_]:
        """Mask [length, length] of a tree pack: row i is true where a token is i itself or one of its ancestors."""
        if self.parents is None:
            raise ValueError("a plain pack has no ancestor mask")
        size = len(self.parents)
        mask = np.zeros((size, size), dtype=np.bool_)
        for index, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                mask[index, : parent + 1] = mask[parent, : parent + 1]
            mask[index, index] = True
        return mask


class _Questions:
    """Collects queries and occurrences; equal queries are asked once."""

    def __init__(self) -> None:
        self._index: dict[tuple[int, int, float], int] = {}
        self._query: list[int] = []
        self._samples: list[Sample] = []
        self._sample: list[int] = []
        self._logprob: list[float] = []

    def add(self, sample: Sample, places: Sequence[int]) -> None:
        """Ask for every sampled token of a sample; ``places[d]`` is the flat index of the token at depth d."""
        tokens = sample.tokens.tolist()
        for depth, logprob in zip(range(sample.start, len(tokens)), sample.logprobs.tolist(), strict=True):
            query = (places[depth - 1], tokens[depth], sample.temperature)
            self._query.append(self._index.setdefault(query, len(self._index)))
            self._sample.append(len(self._samples))
            self._logprob.append(logprob)
        self._samples.append(sample)

    def pack(self, ids: Ints, positions: Ints, parents: Ints | None, lengths: Sequence[int]) -> Pack:
        """The finished pack."""
        queries = list(self._index)
        return Pack(
            input_ids=ids,
            position_ids=positions,
            parents=parents,
            lengths=np.asarray(lengths, dtype=np.int64),
            tokens=sum(lengths),
            query_at=np.asarray([item[0] for item in queries], dtype=np.int64),
            query_token=np.asarray([item[1] for item in queries], dtype=np.int64),
            query_temperature=np.asarray([item[2] for item in queries], dtype=np.float64),
            occurrence_query=np.asarray(self._query, dtype=np.int64),
            occurrence_sample=np.asarray(self._sample, dtype=np.int64),
            occurrence_logprob=np.asarray(self._logprob, dtype=np.float64),
            samples=tuple(self._samples),
        )


def _tree_pack(samples: Sequence[Sample]) -> Pack:
    """One row holding the prefix forest of samples in tree order."""
    ids: list[int] = []
    depths: list[int] = []
    parents: list[int] = []
    questions = _Questions()
    path: list[int] = []  # index of the token at each depth on the way to the current sample
    for index, sample in enumerate(samples):
        common = shared(samples[index - 1], sample) if index else 0
        del path[common:]
        for depth, token in enumerate(sample.tokens[common:].tolist(), start=common):
            parents.append(path[-1] if path else -1)
            path.append(len(ids))
            ids.append(token)
            depths.append(depth)
        questions.add(sample, path)
    return questions.pack(
        np.asarray([ids], dtype=np.int64),
        np.asarray([depths], dtype=np.int64),
        np.asarray(parents, dtype=np.int64),
        [len(ids)],
    )


def tree_packs(groups: Sequence[SequenceGroup], budget: int) -> list[Pack]:
    """Tree packs of at most ``budget`` tokens (a longer single sequence stands alone), whatever the groups' order.

    Where the forest is cut, the next pack repeats only the prefix that its first sequence shares with the last one.
    """
    packs: list[Pack] = []
    current: list[Sample] = []
    size = 0
    for sample in forest(groups):
        new = len(sample.tokens) - (shared(current[-1], sample) if current else 0)
        if current and size + new > budget:
            packs.append(_tree_pack(current))
            current, size, new = [], 0, len(sample.tokens)
        current.append(sample)
        size += new
    if current:
        packs.append(_tree_pack(current))
    return packs


def plain_packs(groups: Sequence[SequenceGroup], budget: int, *, rows: int | None = None) -> list[Pack]:
    """Padded packs, one row per branch; rows × length stays within ``budget`` (a longer single row stands alone).

    ``rows`` bounds the rows of a pack further; 1 for models whose positions depend on the longest row beside them.
    """
    ordered = sorted(
        branches(forest(groups)), key=lambda branch: len(branch[-1].tokens)
    )  # by length: little padding; the sort is stable, so equal lengths keep the order of the tree
    packs: list[Pack] = []
    current: list[list[Sample]] = []
    for branch in ordered:
        full = current and (
            (len(current) + 1) * len(branch[-1].tokens) > budget or (rows is not None and len(current) >= rows)
        )
        if full:
            packs.append(_plain_pack(current))
            current = []
        current.append(branch)
    if current:
        packs.append(_plain_pack(current))
    return packs


def _plain_pack(rows: Sequence[Sequence[Sample]]) -> Pack:
    lengths = [len(branch[-1].tokens) for branch in rows]
    length = max(lengths)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    questions = _Questions()
    for row, branch in enumerate(rows):
        ids[row, : lengths[row]] = branch[-1].tokens
        places = range(row * length, row * length + lengths[row])
        for sample in branch:
            questions.add(sample, places)
    positions = np.broadcast_to(np.arange(length, dtype=np.int64), ids.shape).copy()
    return questions.pack(ids, positions, None, lengths)
