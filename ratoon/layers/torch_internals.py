"""The functions of torch without a public name that are called for speed or for want of another way, each with a plain
one beside it that works with any version. Tried with torch 2.11 to 2.13; pyproject.toml bounds it below 2.14.

The import of torch without its unused parts is another such thing (engine/processes/torch_parts.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor


def _stream_of(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The number of the current device, and the handle of its current stream. The plain ways take some 2 µs longer.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


# A context in which subclasses of tensors are taken for plain ones. Without it results are of the subclass, too
PLAIN_TENSORS: Callable[[], AbstractContextManager[None]] | None = getattr(
    torch._C, "DisableTorchFunctionSubclass", None
)

# A product of numbers in 8 bits
_scaled_mm: Callable[..., Tensor] | None = getattr(torch, "_scaled_mm", None)

_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and handle; torch never frees them


def record(event: torch.cuda.Event) -> None:
    """Records an event on the current stream. torch's own way makes an object for the stream at each call, which takes
    three times as long."""
    device = current_device()
    handle = device, current_stream(device)
    stream = _STREAMS.get(handle)
    if stream is None:
        stream = _STREAMS[handle] = torch.cuda.current_stream(device)
    event.record(stream)


def num_modes() -> int:
    """Returns how many modes of torch's dispatch are on for this thread. Where torch does not say, one is assumed: work
    is then left to a thread that has none."""
    try:
        return int(torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack())
    except AttributeError:
        return 1


def end_allocation_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Has the allocator leave a graph's pool, where ending a capture has failed. Where torch has no such function, the
    memory that is allocated until the pool's end stays in it."""
    leave = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if leave is not None:
        leave(device, pool)


def plain_scaled_product(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Computes what `scaled_product` returns by a product in float32."""
    product = (x.float() @ weight.float()) * x_scales * weight_scales
    return (product if bias is None else product + bias).to(dtype)


def scaled_product(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns x [T, in] times weight [in, out], both in 8 bits, plus the bias [out], in `dtype`. `x_scales` [T, 1] and
    `weight_scales` [1, out] are what the numbers are multiplied by."""
    if _scaled_mm is None:
        return plain_scaled_product(x, weight, x_scales, weight_scales, bias, dtype)
    return _scaled_mm(x, weight, x_scales, weight_scales, bias, out_dtype=dtype, use_fast_accum=True)


class QuickDispatchMode(TorchDispatchMode):
    """A TorchDispatchMode that torch.compile does not have to pass over."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping the mode's method to hide it from torch.compile, which imports that compiler with
        the first call and takes more than a second. A version that does not know this hook wraps it."""
        return False
