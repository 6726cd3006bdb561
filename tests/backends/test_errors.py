import pickle

import pytest
from art_backends import errors
from art_backends.errors import (
    ArtError,
    ControlError,
    EngineError,
    NothingToLearnError,
    ServerError,
    did_you_mean,
    revive,
)

ALL = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ArtError)),
    key=lambda kind: kind.__name__,
)
PUBLIC = [kind for kind in ALL if not kind.__name__.startswith("_")]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_words_survive_pickling(kind):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(kind("what, where, what to do"), protocol))
        assert type(copy) is kind
        assert str(copy) == "what, where, what to do"


@pytest.mark.parametrize("kind", [ControlError, EngineError])
def test_status_and_code_survive_pickling(kind):
    copy = pickle.loads(pickle.dumps(kind("refused", 409, "conflict")))
    assert (str(copy), copy.status, copy.code) == ("refused", 409, "conflict")


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_error_is_the_standard_one_its_page_names(kind):
    page = next((line for line in errors.__doc__.splitlines() if kind.__name__ in line.split()), "")
    assert page, f"{kind.__name__} is missing in the module's page"
    if "(" in page and ")" in page and "(has " not in page.partition(")")[0]:
        named = page.partition("(")[2].partition(")")[0]
        assert issubclass(kind, getattr(__builtins__, named, None) or __builtins__[named])


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_an_error_of_another_process_is_the_same_here(kind):
    error = revive(kind.__name__, "words")
    assert (type(error), str(error)) == (kind, "words")


@pytest.mark.parametrize("name", ["MemoryError", "revive", "annotations", "", "__builtins__"])
def test_an_unknown_name_is_a_server_error(name):
    error = revive(name, "words")
    assert (type(error), str(error)) == (ServerError, "words")


def test_families():
    assert issubclass(ControlError, ServerError)
    assert issubclass(NothingToLearnError, errors.TrainingError)
    assert issubclass(ServerError, ConnectionError)


def test_similar_names_are_named():
    known = ["steps", "group_size", "groups_per_step"]
    assert did_you_mean("stepz", known) == "; did you mean steps?"
    assert did_you_mean(["stepz", "zzz", "group_sise"], known) == "; did you mean steps, group_size?"
    assert did_you_mean("zzz", known) == ""
    assert did_you_mean("x", []) == ""
