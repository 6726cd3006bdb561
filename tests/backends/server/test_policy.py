"""Pins, leases, and which version may go."""

import pytest
from art_backends.server.policy import PolicyTable


@pytest.fixture
def table() -> PolicyTable:
    made = PolicyTable("policy", base_model="base")
    made.loaded |= {1, 2, 3}
    made.move(3)
    return made


def test_a_version_goes_when_nobody_needs_it(table: PolicyTable) -> None:
    assert table.idle() == [1, 2]
    table.pin(1)
    table.pin(1)
    with table.lease("policy@2") as model:
        assert model == "policy@2"
        assert table.idle() == []
        table.unpin(1)
        assert table.idle() == []
        table.changed.clear()
        table.unpin(1)
        assert table.changed.is_set()
        assert table.idle() == [1]
    assert table.idle() == [1, 2]
    assert table.version_of("gpt-4o-mini") == "policy@3"


def test_the_alias_may_be_fixed_to_an_older_version(table: PolicyTable) -> None:
    table.fixed = 1
    assert (table.version_of("gpt-4o-mini"), table.newest) == ("policy@1", 3)
    assert table.idle() == [2]
    table.loaded.add(4)
    table.move(4)
    assert (table.version_of("gpt-4o-mini"), table.newest) == ("policy@1", 4)
    table.fixed = None
    assert table.version_of("gpt-4o-mini") == "policy@4"
    assert table.version_of("policy@2") == "policy@2"  # asked for by name


def test_the_base_model_has_the_engine_s_name(table: PolicyTable) -> None:
    with table.lease("policy@0") as model:
        assert model == "base"
    with pytest.raises(ValueError, match="no version of policy"), table.lease("other@1"):
        pass


def test_the_alias_moves_to_loaded_versions_only(table: PolicyTable) -> None:
    with pytest.raises(ValueError, match="policy@9 is not loaded"):
        table.move(9)


def test_names_it_answers_for(table: PolicyTable) -> None:
    assert table.answers("anything")
    assert not table.answers("policy@9")
    table.models = ["gpt-4o-mini"]
    assert table.answers("gpt-4o-mini")
    assert table.answers("policy")
    assert table.answers("policy@2")
    assert not table.answers("policy@9")  # not loaded
    assert not table.answers("gpt-4o")
    assert not table.answers("policy@x")


def test_a_lease_ends_when_the_call_fails(table: PolicyTable) -> None:
    with pytest.raises(RuntimeError), table.lease("policy@1"):
        raise RuntimeError
    assert table.in_flight(1) == 0
