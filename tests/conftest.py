"""What holds for every test: no network beyond loopback, and a cache folder that is the machine's own."""

import pytest
from pytest_socket import socket_allow_hosts


@pytest.fixture(autouse=True)
def _loopback_only() -> None:
    """A connection to any other host is an error, not a slow test."""
    socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)
