"""The LLM of the api tests, on an engine that plays a script."""

from tests.unit.api.conftest import client, source

__all__ = ["client", "source"]
