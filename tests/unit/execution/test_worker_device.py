"""Which operations serve a device."""

from dataclasses import replace

import pytest
import torch

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError
from ratoon.execution.choices import choose_kv_dtype, choose_ops
from ratoon.execution.devices import use_device
from ratoon.execution.worker import describe_weights
from ratoon.layers.native import library
from ratoon.layers.native_ops import encode, native_ops_reasons
from ratoon.layers.ops import WeightUse
from ratoon.layers.stored import StoredTensor


def test_operations_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    expected = "torch" if native_ops_reasons(cpu, torch.float32) else "native"
    assert choose_ops(cpu, torch.float32).name == expected
    assert choose_ops(cpu, torch.bfloat16).name == "torch"
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_ops(cuda, torch.bfloat16).name == "cuda"
    assert choose_ops(cuda, torch.bfloat16, quantization="fp8").quantization == "fp8"
    for device, dtype in ((cuda, torch.float32), (cpu, torch.bfloat16)):
        with pytest.raises(ConfigError, match=r"quantization: fp8 is not there"):
            choose_ops(device, dtype, quantization="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"bfloat16 on NVIDIA H200 \(compute capability 8.6\)"):
        choose_ops(cuda, torch.bfloat16, quantization="fp8")
    with pytest.raises(ConfigError, match="one of the two"):
        choose_ops(cuda, torch.bfloat16, batch_invariant=True, quantization="fp8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_floats_are_kept_in_fewer_bits_beside_float32_on_a_cpu(quantization: str) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=rf"quantization: {quantization} is not there .* torch.bfloat16 on cpu"):
        choose_ops(cpu, torch.bfloat16, quantization=quantization)
    if library() is not None:
        assert choose_ops(cpu, torch.float32, quantization=quantization).bits == int(quantization[-1])


class Checkpoint:
    """A matrix, in this many bits, a table and a vector of floats."""

    name = "checkpoint"

    def __init__(self, bits: int | None = None) -> None:
        tensors = {"table": torch.randn(64, 8), "matrix": torch.randn(64, 64), "norm": torch.ones(64)}
        self._stored = {name: StoredTensor.of_floats(tensor) for name, tensor in tensors.items()}
        if bits is not None:
            self._stored["matrix"] = encode(tensors["matrix"], bits)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def read(self, name: str, part: object = None, destination: object = None) -> StoredTensor:
        return self._stored[name]


@pytest.mark.skipif(library() is None, reason="no kernels were built for this processor")
def test_keys_and_values_are_halves_beside_quantised_weights_on_a_cpu() -> None:
    def kept(quantization: str, checkpoint: Checkpoint, kv_cache_dtype: str = "auto") -> torch.dtype | None:
        config = EngineConfig(model="checkpoint", quantization=quantization)
        config = replace(config, cache=replace(config.cache, kv_cache_dtype=kv_cache_dtype))
        return choose_kv_dtype(config, choose_ops(torch.device("cpu"), torch.float32, False, quantization), checkpoint)

    assert kept("auto", Checkpoint()) is None
    assert kept("auto", Checkpoint(4)) == kept("auto", Checkpoint(8)) == torch.float16
    assert kept("none", Checkpoint(4)) is None
    assert kept("int8", Checkpoint()) == kept("int4", Checkpoint()) == torch.float16
    assert kept("auto", Checkpoint(4), "float32") == torch.float32
    assert kept("auto", Checkpoint(), "int8") == torch.int8
    config = EngineConfig(model="checkpoint")
    assert choose_kv_dtype(config, choose_ops(torch.device("cpu"), torch.bfloat16), Checkpoint(4)) is None


def test_weights_in_8_bits_are_counted_as_such() -> None:
    pytest.importorskip("triton")
    from ratoon.layers.cuda_ops import CudaOps

    ops = CudaOps(quantization="fp8")
    stored = ops.quantize(StoredTensor.of_floats(torch.randn(64, 32)), WeightUse.LINEAR)
    found = ops.find_format(stored)
    assert found is not None
    found.make_linear([stored, stored], None)
    in_8_bits, rest = describe_weights(ops, 5000, torch.bfloat16)
    assert (in_8_bits["format"], in_8_bits["num_weights"]) == ("fp8", 2 * 64 * 32)
    assert in_8_bits["num_bytes"] == 2 * (64 * 32 + 64 * 4)
    assert (rest["format"], rest["num_bytes"]) == ("bfloat16", 2 * (5000 - 2 * 64 * 32))


@pytest.mark.parametrize(("name", "chosen"), [("cpu", []), ("cuda", []), ("cuda:1", [torch.device("cuda:1")])])
def test_kernels_are_launched_on_the_device_that_has_a_number(
    name: str, chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    use_device(torch.device(name))
    assert used == chosen


def test_sums_that_depend_on_the_batch_are_refused_where_they_must_not() -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant: sums depend on the batch .*torch\.bfloat16 on cpu"):
        choose_ops(torch.device("cpu"), torch.bfloat16, batch_invariant=True)
