"""An LLM on an engine that plays a script, for everything that is built on top of one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from tests.unit.engine.fakes import FakeClient, byte_tokenizer, model_config


class FakeSource(SimpleNamespace):
    prompts: ClassVar[dict[str, str]] = {}
    default_prompt: str | None = None

    def load_tokenizer(self):
        return byte_tokenizer()


@pytest.fixture
def source() -> FakeSource:
    return FakeSource(
        name="fake",
        path="/nowhere",
        format="fake",
        config=model_config(),
        generation_defaults={"temperature": 0.5},
        pooling=None,
        chat_template="{{ messages }}",
    )


@pytest.fixture
def client(monkeypatch, source) -> FakeClient:
    """An LLM that is built in the test talks to this."""
    made = FakeClient()
    models, clients = ModuleType("ratoon.models.source"), ModuleType("ratoon.engine.processes.client")
    models.resolve_model = lambda name, *_: source
    clients.make_client = lambda config, source, timer, process: made
    monkeypatch.setitem(sys.modules, "ratoon.models.source", models)
    monkeypatch.setitem(sys.modules, "ratoon.engine.processes.client", clients)
    return made
