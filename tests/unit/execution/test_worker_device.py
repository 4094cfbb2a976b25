"""What the device "auto" means."""

import pytest
import torch

from ratoon.core.errors import ConfigError
from ratoon.execution.worker import DEVICE_VARIABLE, resolve_device


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
