"""What the device "auto" means, and which operations serve a device."""

import sys

import pytest
import torch

from ratoon.core.errors import ConfigError
from ratoon.execution.worker import DEVICE_VARIABLE, choose_ops, resolve_device
from ratoon.layers.native_ops import native_ops_reasons


def test_auto_is_cuda_where_there_is_one_unless_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert resolve_device("auto").type == "cpu"
    assert resolve_device("cuda").type == "cuda"
    monkeypatch.delenv(DEVICE_VARIABLE)
    assert resolve_device("auto").type == "cuda"
    monkeypatch.setenv(DEVICE_VARIABLE, "tpu")
    with pytest.raises(ConfigError, match="tpu"):
        resolve_device("auto")


def test_operations_are_those_of_the_device_and_the_reason_for_slow_ones_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    expected = "torch" if native_ops_reasons(cpu, torch.float32) else "native"
    assert choose_ops(cpu, torch.float32).name == expected
    assert choose_ops(cpu, torch.bfloat16).name == "torch"
    with monkeypatch.context() as without_triton:
        without_triton.setitem(sys.modules, "triton", None)
        for name in [name for name in sys.modules if name.startswith("ratoon.layers.triton")]:
            without_triton.delitem(sys.modules, name)
        without_triton.delitem(sys.modules, "ratoon.layers.cuda_ops", raising=False)
        assert choose_ops(cuda, torch.bfloat16).name == "torch"
    assert "triton" in caplog.text
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_ops(cuda, torch.bfloat16).name == "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_ops(cuda, torch.float16).name == "torch"
    assert "newer GPU" in caplog.text
