"""The engine's process, without sockets and without a model."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from ratoon.core.messages import EngineMessageType
from ratoon.core.settings import engine_config
from ratoon.engine.processes import core_process
from ratoon.engine.processes.core_process import EngineCoreProcess


class QuietProcess(EngineCoreProcess):
    """Starts a core that is none, and notes what happens."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(index=0))  # type: ignore[arg-type]
        self.sent: list[EngineMessageType] = []
        self.num_frozen_in_loop = 0

    def _start(self, timer: Any) -> Any:
        facts = SimpleNamespace(kv_config=SimpleNamespace(whole_blocks=16), max_model_len=64, encoder_address="")
        config = engine_config("m")
        executor = SimpleNamespace(facts=facts)
        return SimpleNamespace(config=config, executor=executor, shutdown=lambda: None, kv_address="")

    def _read_messages(self) -> None: ...

    _beat = _hold_lifeline = _remove_directory = _read_messages

    def _send(self, kind: EngineMessageType, message: Any, flags: int = 0) -> None:
        self.sent.append(kind)

    def _loop(self, core: Any, utilities: Any) -> None:
        self.num_frozen_in_loop = gc.get_freeze_count()


def test_what_start_up_made_is_not_traversed_for_garbage_while_steps_run(monkeypatch):
    monkeypatch.setattr(core_process, "describe", lambda core: {})
    monkeypatch.setattr(core_process, "EngineUtilities", lambda core, index: None)
    process = QuietProcess()
    try:
        assert process.run() == 0
    finally:
        gc.unfreeze()
    assert process.sent == [EngineMessageType.READY]
    assert process.num_frozen_in_loop > 10_000
