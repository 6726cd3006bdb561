"""Which provider a call goes to whose model is not the policy's: one that is configured, and no other.

Nothing in a request can name an address or a key: a provider is chosen by the model's name and the dialect alone, and
its key comes from this process's environment. It refuses to translate: a provider is asked in the format that the
client speaks, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from art_backends.config import Provider
from art_backends.errors import ConfigError
from art_backends.proxy.engine_client import EngineClient


@dataclass(frozen=True)
class Upstream:
    """A provider, ready to be asked."""

    name: str
    format: str
    models: tuple[str, ...]
    client: EngineClient

    def takes(self, model: str, form: str) -> bool:
        """Whether it is asked for this model in this format."""
        return form == self.format and any(fnmatchcase(model, pattern) for pattern in self.models)


class Providers:
    """All that are configured, in their order; the first that takes a model gets its calls."""

    def __init__(self, configured: Sequence[Provider] = (), environment: Mapping[str, str] | None = None) -> None:
        """ConfigError if a key is not in the environment."""
        self._upstreams = [_upstream(item, os.environ if environment is None else environment) for item in configured]

    def find(self, model: str, form: str) -> Upstream | None:
        """The provider of a model for clients of this format."""
        return next((item for item in self._upstreams if item.takes(model, form)), None)

    def formats(self, model: str) -> list[str]:
        """The formats in which some provider takes this model."""
        return sorted({item.format for item in self._upstreams if item.takes(model, item.format)})

    async def aclose(self) -> None:
        """Close all connections."""
        for item in self._upstreams:
            await item.client.aclose()


def _upstream(provider: Provider, environment: Mapping[str, str]) -> Upstream:
    key = environment.get(provider.key_env) if provider.key_env is not None else None
    if provider.key_env is not None and not key:
        raise ConfigError(f"provider {provider.name}: the environment has no {provider.key_env}")
    headers = {}
    if key and provider.format == "anthropic":
        headers = {"x-api-key": key}
    elif key:
        headers = {"authorization": f"Bearer {key}"}
    client = EngineClient(url=provider.url, headers=headers, proxied=True)
    return Upstream(provider.name, provider.format, tuple(provider.models), client)
