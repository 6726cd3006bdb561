"""LangChain's LLM cache is set aside for a run, and comes back."""

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import get_llm_cache, set_llm_cache

from art_langgraph.caches import llm_cache_off


@pytest.fixture
def cache():
    made = InMemoryCache()
    set_llm_cache(made)
    yield made
    set_llm_cache(None)


def test_it_is_off_and_comes_back(cache):
    def fails():
        with llm_cache_off() as told:
            assert get_llm_cache() is None
            assert told == "LangChain's LLM cache (InMemoryCache) is off while rollouts run"
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert get_llm_cache() is cache


def test_one_that_the_app_sets_meanwhile_stays(cache):
    other = InMemoryCache()
    with llm_cache_off():
        set_llm_cache(other)
    assert get_llm_cache() is other


def test_without_one_nothing_is_said():
    with llm_cache_off() as told:
        assert told is None
    assert get_llm_cache() is None
