"""What holds for every test: no network beyond loopback, and a cache folder that is the machine's own."""

import pytest
from hypothesis import settings
from pytest_socket import socket_allow_hosts

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's matter
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=10, help="how often processes are killed in the kill loops")
    parser.addoption("--soak", type=float, default=20, help="seconds of the load under which nothing may grow")


@pytest.fixture(scope="session")
def kills(request: pytest.FixtureRequest) -> int:
    """Rounds of a kill loop: few in an ordinary run, many at night."""
    return int(request.config.getoption("--kills"))


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> float:
    """Seconds of a load under which nothing may grow: few in an ordinary run, minutes at night."""
    return float(request.config.getoption("--soak"))


@pytest.fixture(autouse=True)
def _loopback_only() -> None:
    """A connection to any other host is an error, not a slow test."""
    socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)
