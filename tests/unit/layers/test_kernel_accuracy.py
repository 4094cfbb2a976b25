"""How exact the CPU kernels are: their error against float64, beside torch's, and beside what the arithmetic allows.

A kernel that sums in one long chain fails here at the large sizes, long before a model's answers show it.
"""

import pytest
import torch

from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)),
    reason="no kernels for this processor; `make setup` builds them",
)

UNIT = 2.0**-24  # the largest relative error of one rounding
LONGEST_CHAIN = 64  # products that a kernel may add up one after another
SAMPLING = 1.15  # two root mean squares of some thousand errors each differ by less than this when nothing else does


def root_mean_square(error: torch.Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt())


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("depth", [64, 576, 1536, 4096, 11008])
@pytest.mark.parametrize("rows", [1, 33])
def test_a_product_is_as_exact_as_torch_and_does_not_get_worse_with_its_depth(depth: int, rows: int) -> None:
    x, weight = random(33, depth, seed=depth), random(256, depth, seed=1) / depth**0.5
    exact = x.double() @ weight.double().T  # entries of about 1
    multiply = NativeOps().make_linear(weight, None)
    error = root_mean_square(torch.cat([multiply(part) for part in x.split(rows)]) - exact)
    # torch's product of all rows at once: that of a single row sums in another, finer order.
    assert error < SAMPLING * root_mean_square(TorchOps().make_linear(weight, None)(x) - exact)
    # A chain of n random terms has n/6 roundings' worth of variance, n partial sums n/2; 12 chains are a block.
    chains = -(-depth // LONGEST_CHAIN)
    variance = LONGEST_CHAIN / 6 + min(chains, 12) / 2 + chains / 12 / 2
    assert error < UNIT * variance**0.5


@pytest.mark.parametrize("width", [64, 576, 4096, 11008])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_norms_are_as_exact_as_torch(width: int, offset: float) -> None:
    x, weight, bias = random(64, width, seed=1) + offset, random(width, seed=2), random(width, seed=3)
    ours, theirs = NativeOps(), TorchOps()
    exact = theirs.rms_norm(x.double(), weight.double(), 1e-5)
    # The kernel and torch each round a few times for an element; the sum's own error is small beside that.
    allowed = max(SAMPLING * root_mean_square(theirs.rms_norm(x, weight, 1e-5) - exact), 2 * UNIT)
    assert root_mean_square(ours.rms_norm(x, weight, 1e-5) - exact) < allowed
    exact = theirs.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    allowed = max(SAMPLING * root_mean_square(theirs.layer_norm(x, weight, bias, 1e-5) - exact), 2 * UNIT)
    assert root_mean_square(ours.layer_norm(x, weight, bias, 1e-5) - exact) < allowed
