"""Names that were given for models and nodes: wrong ones are said before anything runs."""

import pytest
from art_backends.errors import ConfigError

from art_langgraph.inspection import FoundModel, Inspection
from art_langgraph.names import check_names


def found(*models: FoundModel, **changes) -> Inspection:
    fields = {"nodes": ["agent", "team", "team/writer"], "agents": ["researcher"], "models": list(models)}
    return Inspection(**{**fields, **changes})


def model(name: str = "gpt", node: str = "agent", route: str = "policy", trained: bool = True) -> FoundModel:
    return FoundModel("ChatOpenAI", name, node, route, "", trained=trained)


@pytest.mark.parametrize("nodes", [[], ["agent"], ["team/writer"], ["writer"], ["researcher", "agent"]])
def test_right_names(nodes):
    assert check_names(found(model(), model("mini", "team/writer")), ["gpt"], nodes) == []


@pytest.mark.parametrize(
    ("models", "nodes", "said"),
    [
        (
            ["gtp"],
            [],
            "models: no model of the graph was found by the name gtp; did you mean gpt? There are: gpt, mini",
        ),
        (["x", "gpt"], [], "models: no model of the graph was found by the name x; there are: gpt, mini"),
        (
            [],
            ["agnt"],
            "nodes: no node or agent of the graph was found by the name agnt; did you mean agent? There are: agent, "
            "team, team/writer, researcher",
        ),
        (
            [],
            ["riter", "agent"],
            "nodes: no node or agent of the graph was found by the name riter; did you mean writer? There are: agent, "
            "team, team/writer, researcher",
        ),
    ],
)
def test_wrong_names(models, nodes, said):
    there = model(), model("mini")
    with pytest.raises(ConfigError) as caught:
        check_names(found(*there), models, nodes)
    assert str(caught.value) == said
    (warning, *_) = check_names(found(*there, late=True), models, nodes)
    assert warning.startswith(f"{said}; ")
    assert warning.endswith("made while the graph runs may have others")


def test_models_that_are_made_late_make_no_nodes():
    there = found(model(), model("?"), chosen_late=True)
    assert len(check_names(there, ["x"], [])) == 1
    with pytest.raises(ConfigError, match="by the name x; there are: agent, team, team/writer, researcher"):
        check_names(there, [], ["x"])


def test_a_model_whose_name_is_decided_at_the_call_may_be_the_one():
    (warning,) = check_names(found(model(), model("?")), ["mini"], [])
    assert "by the name mini; there are: gpt; models that are made while the graph runs" in warning


def test_where_nothing_was_found_nothing_is_said():
    assert check_names(Inspection(), ["gpt"], ["agent"]) == []
    assert check_names(Inspection(nodes=["agent"]), ["gpt"], ["agent"]) == []


def test_nodes_without_a_model():
    (warning,) = check_names(found(model(trained=False), model(route="provider")), [], ["team"])
    assert warning == "nodes: no model of the policy was found in team, only in agent: perhaps nothing would train"
    assert check_names(found(model(trained=False), model(node="team")), [], ["team"]) == []


def test_a_long_list_is_cut():
    many = found(model(), nodes=[f"node {number:02}" for number in range(30)], agents=[])
    with pytest.raises(ConfigError, match=r"there are: node 00, .*, node 19 and 10 more$"):
        check_names(many, [], ["x"])


def test_nodes_whose_models_are_not_the_policys():
    there = model("gpt", trained=False), FoundModel("ChatOpenAI", "mini", "team", "provider", "", by_name=True)
    (warning,) = check_names(found(*there), ["gpt"], ["team"])
    assert "found in team, only in agent, and models does not name mini: perhaps" in warning
