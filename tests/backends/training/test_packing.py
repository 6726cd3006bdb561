from __future__ import annotations

import random

import numpy as np
import pytest
from art_backends.training.packing import Pack, plain_packs, tree_packs
from art_backends.training.sequences import build, distinct_tokens, forest

from tests.backends.training.conftest import common_batch, make_call, make_group, rich_batch


def path(pack: Pack, at: int) -> list[int]:
    """Ids from the root to a token."""
    if pack.parents is None:
        row, column = divmod(at, pack.input_ids.shape[1])
        return pack.input_ids[row, : column + 1].tolist()
    ids = []
    while at >= 0:
        ids.append(int(pack.input_ids[0, at]))
        at = int(pack.parents[at])
    return ids[::-1]


def asked(packs: list[Pack]) -> list[tuple]:
    """Every occurrence with the whole context that its logprob will be computed from."""
    found = []
    for pack in packs:
        for query, sample, logprob in zip(
            pack.occurrence_query, pack.occurrence_sample, pack.occurrence_logprob, strict=True
        ):
            rollout = pack.samples[sample].rollout_id
            context = tuple(path(pack, int(pack.query_at[query])))
            found.append(
                (context, int(pack.query_token[query]), rollout, float(logprob), float(pack.query_temperature[query]))
            )
    return sorted(found)


def expected(groups) -> list[tuple]:
    return sorted(
        (tuple(s.tokens[:depth].tolist()), int(s.tokens[depth]), s.rollout_id, float(logprob), s.temperature)
        for group in groups
        for s in group.samples
        for depth, logprob in zip(range(s.start, len(s.tokens)), s.logprobs, strict=True)
    )


def random_batch(seed: int):
    draw = random.Random(seed)
    groups = []
    for number in range(3):
        rollouts = []
        for sample in range(4):
            prompt = [number, 1, 2]
            calls = []
            for turn in range(draw.randint(1, 4)):
                sampled = [draw.randint(0, 2) for _ in range(draw.randint(1, 4))]
                calls.append(make_call(f"{number}{sample}{turn}", prompt, sampled, sequence=turn))
                if draw.random() < 0.7:
                    prompt = [*prompt, *sampled, draw.randint(3, 4)]
            rollouts.append((f"r{number}{sample}", draw.random(), calls))
        groups.append(make_group(f"g{number}", *rollouts))
    return build(groups)


@pytest.mark.parametrize("budget", [8, 12, 20, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_every_sampled_token_is_asked_once_per_rollout_with_its_own_context(seed, budget):
    groups = random_batch(seed)
    assert asked(tree_packs(groups, budget)) == expected(groups)
    assert asked(plain_packs(groups, budget)) == expected(groups)
    assert asked(plain_packs(groups, budget, rows=1)) == expected(groups)


def test_one_pack_computes_each_distinct_token_once():
    groups = build(rich_batch())
    packs = tree_packs(groups, 10_000)
    assert len(packs) == 1
    assert packs[0].tokens == packs[0].input_ids.size == distinct_tokens(forest(groups))
    assert packs[0].tokens < sum(distinct_tokens(group.samples) for group in groups)  # groups share, too


def test_a_cut_repeats_only_the_shared_prefix_and_stays_within_the_budget():
    prompt = list(range(20))
    group = make_group("g", *((f"r{n}", float(n), [make_call(f"c{n}", prompt, [30 + n] * 10)]) for n in range(6)))
    groups = build([group])
    packs = tree_packs(groups, 45)
    assert [pack.tokens for pack in packs] == [40, 40, 40]
    assert sum(pack.tokens for pack in packs) == distinct_tokens(groups[0].samples) + (len(packs) - 1) * len(prompt)


def test_a_sequence_longer_than_the_budget_stands_alone():
    long = make_call("a", list(range(50)), [1, 2])
    packs = tree_packs(build([make_group("g", ("r", 1.0, [long]), ("s", 0.0, [make_call("b", [7], [8])]))]), 10)
    assert sorted(pack.tokens for pack in packs) == [2, 52]


def test_what_groups_share_is_computed_once_in_a_pack_and_repeated_only_by_a_cut():
    groups = build(common_batch())
    (whole,) = tree_packs(groups, 1000)
    assert whole.parents is not None
    assert whole.tokens == distinct_tokens(forest(groups)) == 21 + 4 * (2 + 3 * 6)
    assert (whole.parents == -1).sum() == 1
    packs = tree_packs(groups, 70)  # the cut falls between the rollouts of the third group: 23 tokens are repeated
    assert [pack.tokens for pack in packs] == [69, 55]
    assert sum(pack.tokens for pack in packs) == whole.tokens + 23


def test_packs_are_the_same_whatever_the_order_of_the_groups():
    first = tree_packs(build(common_batch()), 70)
    second = tree_packs(build(common_batch()[::-1])[::-1], 70)
    for one, other in zip(first, second, strict=True):
        assert [s.key for s in one.samples] == [s.key for s in other.samples]
        for name in vars(one).keys() - {"samples"}:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_ancestors_and_depth():
    (pack,) = tree_packs(random_batch(1), 1000)
    mask = pack.ancestors()
    assert pack.parents is not None
    for index in range(len(mask)):
        chain, at = set(), index
        while at >= 0:
            chain.add(at)
            at = int(pack.parents[at])
        assert set(np.flatnonzero(mask[index])) == chain
        assert pack.position_ids[0, index] == len(chain) - 1
        assert mask[index].sum() == len(chain)


def test_plain_rows_stay_within_the_budget_and_say_where_padding_begins():
    packs = plain_packs(build(rich_batch()), 40)
    assert all(pack.input_ids.size <= 40 for pack in packs)
    assert all(pack.tokens == pack.lengths.sum() for pack in packs)
    with pytest.raises(ValueError, match="no ancestor mask"):
        packs[0].ancestors()
