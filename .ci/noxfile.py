"""Capture on other versions: ``nox -f .ci/noxfile.py``; each session makes an environment of its own.

The core tests run on what requirements.lock pins. Here the capture tests run on older openai SDKs, and the LangGraph
tests on the newest LangChain, on each Python, and on an old one.
"""

import nox

nox.options.default_venv_backend = "venv"
PYTHONS = ["3.11", "3.12", "3.13"]
TESTING = ["pytest", "pytest-asyncio", "pytest-socket", "pytest-timeout", "pytest-xdist", "hypothesis"]
PROVIDERS = ["langchain-anthropic", "langchain-google-genai", "langchain-ollama"]
# LangGraph 1.0 with its own prebuilt agents: it asks for less than the newest of those need.
OLD = [
    "langgraph==1.0.6",
    "langgraph-prebuilt==1.0.6",
    "langchain==1.2.4",
    "langchain-core==1.2.7",
    "langchain-openai==1.1.7",
]
WATCHERS = ["langfuse>=5", "openinference-instrumentation-langchain", "openinference-instrumentation-openai"]


@nox.session(python=PYTHONS)
@nox.parametrize("openai", ["1.109.1", "2.45.0", "3.57.0"])
def capture(session: nox.Session, openai: str) -> None:
    """The route of the openai SDK, without any framework."""
    session.install("-e", "..", f"openai=={openai}", *TESTING)
    session.chdir("..")
    session.run("pytest", "-q", "-n", "2", "tests/backends/capture")


@nox.session(python=PYTHONS)
def langgraph(session: nox.Session) -> None:
    """Everything of the LangGraph door that needs no model."""
    session.install("-e", "..[langgraph]", "langchain>=1.0", *PROVIDERS, *WATCHERS, *TESTING)
    session.chdir("..")
    session.run("pytest", "-q", "-n", "2", "-m", "not slow", "tests/art_langgraph", "tests/backends/capture")


@nox.session(python="3.11")
def langgraph_old(session: nox.Session) -> None:
    """The same on LangGraph 1.0, but for the names of agents, which it does not hand on, and for other providers."""
    session.install("-e", "..[langgraph]", *OLD, *PROVIDERS, *WATCHERS, *TESTING)
    session.chdir("..")
    left_out = "not tells_its_name and not as_a_node_and_within"
    chosen = ["-m", "not slow", "-k", left_out, "--ignore", "tests/art_langgraph/test_providers.py"]
    session.run("pytest", "-q", "-n", "2", *chosen, "tests/art_langgraph", "tests/backends/capture")
