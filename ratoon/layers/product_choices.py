"""Which kernel multiplies: by shape of the weight, dtype and number of rows.

Without a measurement the choice is a fixed function of the shape, so that two runs do the same. A measurement, made on
request (product_measurement.py), replaces it. It is kept in a file of the user's cache folder, for this GPU and these
versions of torch, Triton and the kernels. A file that is damaged, or was measured with other kernels, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ratoon.core.machine import cache_folder

logger = logging.getLogger(__name__)

MAX_ROWS = 4  # of triton/gemv.py
MAX_PANEL_ROWS = 64  # of triton/panel.py
PANEL_OUTPUTS = 16  # a multiple of this for each warp
PANEL_STEP_BYTES = 64  # of a weight's row: multiplied by a warp at a time
MAX_PANEL_NUMBERS = 7 * 2**20  # of a weight, which a GPU's registers hold at once
PANEL_DTYPES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # bytes of a number; also those of triton/stream.py
STREAM_ROW_BYTES = 16  # a multiple of this: the length of a weight's row
MIN_STREAM_STEPS = 8  # of a program
MAX_16_BIT_STREAM_ROWS = 32  # with more the library's products are as fast
NUM_SMS = 132  # multiprocessors of an H200
SHARED_BYTES = 226_000  # of each of them, less a little for each of two programs
ROW_COUNTS = (0, 1, 2, 3, 4, 8, 16, 32, 64)  # that choices are made for; others have that of the next larger one
KINDS = ("linear", "gated")  # "gated": with the gate's activation in the same kernel


class Tile(NamedTuple):
    """What one program of a kernel for few rows computes: `outputs`, in steps of `inputs` of the sum."""

    outputs: int
    inputs: int
    num_warps: int


class Panel(NamedTuple):
    """What one program of triton/panel.py computes: `outputs`, by `k_warps` warps that take turns in the inputs of the
    sum, times `out_warps` that share the outputs. `splits` programs share the sums."""

    outputs: int
    k_warps: int
    out_warps: int
    splits: int


class Stream(NamedTuple):
    """What one program of triton/stream.py multiplies at a time: `outputs`, by a step of `step_bytes` of each weight's
    row. `stages` steps are on their way. `splits` programs share the sums."""

    outputs: int
    step_bytes: int
    stages: int
    num_warps: int
    splits: int


class Split(NamedTuple):
    """A tile of triton/matmul.py: what one program computes, and how often the sum over inputs is cut."""

    rows: int
    outputs: int
    inputs: int
    splits: int
    num_warps: int
    num_stages: int


Choice = Tile | Panel | Stream | Split | None  # None: the library's product
KERNELS: dict[Any, str] = {Tile: "gemv", Panel: "panel", Stream: "stream", Split: "matmul"}  # modules of layers/triton


class ProductKey(NamedTuple):
    kind: str
    outputs: int  # of the weight: for "gated" twice those of the result
    inputs: int
    dtype: str
    rows: int

    def __str__(self) -> str:
        return f"{self.kind} {self.outputs}x{self.inputs} {self.dtype} {self.rows}"


class ProductChoices:
    """The kernel for each number of rows."""

    def __init__(
        self, measured: Mapping[str, Choice] | None = None, has_wgmma: bool = False, has_gluon: bool = True
    ) -> None:
        """`measured`: by str(ProductKey). `has_wgmma`: kernels for Hopper can run; `has_gluon`: those in Gluon can."""
        self.measured = dict(measured or {})
        self.has_wgmma = has_wgmma
        self.has_gluon = has_gluon

    def __str__(self) -> str:
        return f"{len(self.measured)} shapes as measured" if self.measured else "all shapes as by default"

    def of(self, kind: str, weight: torch.Tensor) -> list[Choice]:
        """The choices for a weight [out, in], by number of rows; with more rows than it is long, the library's."""
        assert kind in KINDS
        outputs, inputs = weight.shape
        choices: list[Choice] = []
        for rows in ROW_COUNTS:
            key = ProductKey(kind, outputs, inputs, dtype_name(weight.dtype), rows)
            by_default = default_choice(key, self.has_wgmma, self.has_gluon)
            choice = self.measured.get(str(key), by_default)
            choices += [choice] * (rows + 1 - len(choices))
        return choices


def default_choice(key: ProductKey, has_wgmma: bool = False, has_gluon: bool = True) -> Choice:
    """What was fastest on an H200. Small weights: panels, for all numbers of rows that they can. Large ones: for one
    row small tiles, larger ones where a row of the weight is long; from two rows on streams, which in 8 bits take one
    row too, or the library's product where these can't run or are no faster."""
    if has_gluon and (panels := panels_of(key)):
        return panels[0]
    is_fp8 = key.dtype.startswith("float8")
    if has_wgmma and (is_fp8 or 1 < key.rows <= MAX_16_BIT_STREAM_ROWS) and (streams := streams_of(key)):
        return streams[0]
    if key.rows != 1:
        return None
    if is_fp8:
        return Tile(1 if key.outputs <= 4096 else 2, 2048, 4)
    return Tile(2 if key.inputs <= 1024 else 1 if key.inputs < 4096 else 4, 1024, 4)


def panels_of(key: ProductKey) -> list[Panel]:
    """Lists the panels that are worth a measurement, the best guess first. There is none for a weight that is too
    large, or whose rows are not of whole steps."""
    if key.dtype not in PANEL_DTYPES or not 0 < key.rows <= MAX_PANEL_ROWS:
        return []
    if key.outputs * key.inputs > MAX_PANEL_NUMBERS or key.inputs * PANEL_DTYPES[key.dtype] % PANEL_STEP_BYTES:
        return []
    if key.kind == "gated":
        found = [Panel(16, 4, 1, 1), Panel(16, 8, 1, 1), Panel(32, 8, 2, 1)]
    elif key.outputs > 2048:
        found = [Panel(32, 8, 1, 1), Panel(64, 8, 2, 1)]
    else:  # more rows are more inputs to read: with shared sums each program reads fewer
        shared = Panel(32, 8, 1, -(-key.inputs // 1024))
        found = [Panel(16, 8, 1, 1), Panel(16, 16, 1, 1), Panel(32, 16, 1, 1)]
        found.insert(0 if key.rows > 16 and shared.splits > 1 else 1, shared)
    outputs = 2 if key.kind == "gated" else 1  # of the weight, for each of a panel
    room = 32 * (256 if key.rows <= 32 else 128)  # numbers that a warp's registers hold beside the sums
    return [
        panel
        for panel in found
        if outputs * panel.outputs * key.inputs <= room * panel.k_warps * panel.out_warps * panel.splits
    ]


def streams_of(key: ProductKey) -> list[Stream]:
    """Lists the streams that are worth a measurement on Hopper GPUs, for weights that are too large for panels."""
    if key.dtype not in PANEL_DTYPES or not 0 < key.rows <= MAX_PANEL_ROWS:
        return []
    if key.outputs * key.inputs <= MAX_PANEL_NUMBERS or key.inputs * PANEL_DTYPES[key.dtype] % STREAM_ROW_BYTES:
        return []
    is_gated, is_fp8 = key.kind == "gated", key.dtype.startswith("float8")
    weight_rows = 128 if is_gated else 64  # of a tile, which has 64 outputs
    tiles = -(-key.outputs // weight_rows)
    if not is_fp8 and tiles > 2 * NUM_SMS:  # not all at once
        return []
    row_bytes = key.inputs * PANEL_DTYPES[key.dtype]
    rows = max(8, 1 << (key.rows - 1).bit_length())

    def stream(per_sm: int, step_bytes: int, num_bytes: int) -> Stream:
        stages = num_bytes // (step_bytes * (weight_rows + rows))
        most_splits = max(1, row_bytes // step_bytes // MIN_STREAM_STEPS)
        return Stream(64, step_bytes, stages, 4, max(1, min(per_sm * NUM_SMS // tiles, most_splits)))

    found = [
        stream(1, 256, SHARED_BYTES if is_gated else SHARED_BYTES * 2 // 3),
        stream(2, 128 if is_gated else 256, SHARED_BYTES // 2),
    ]
    return found[::-1] if is_fp8 else found


def invariant_choice(outputs: int, inputs: int) -> Split:
    """Returns the choice for all numbers of rows: one size of tile, and a sum in as many parts as keep a GPU busy with
    one row."""
    splits = 1
    while splits < 16 and splits * -(-outputs // 128) < 128 and inputs >= 512 * splits:
        splits *= 2
    return Split(rows=64, outputs=128, inputs=64, splits=splits, num_warps=4, num_stages=4)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choices_file(device: torch.device) -> Path:
    """The file of the choices for this GPU and these versions: another kernel may be fastest with others."""
    import triton

    gpu = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device))
    name = f"products-{gpu}-torch-{torch.__version__}-triton-{triton.__version__}.json"
    return cache_folder() / re.sub(r"[^A-Za-z0-9.+-]", "-", name)


@cache
def kernel_set() -> str:
    """Stands for the kernels that are chosen among: their choices' names and fields, and their source. It differs as
    soon as a measurement with other kernels would."""
    digest = hashlib.sha256()
    for kind, module in KERNELS.items():
        digest.update(f"{kind.__name__}{kind._fields}".encode())
        digest.update((Path(__file__).parent / "triton" / f"{module}.py").read_bytes())
    return digest.hexdigest()[:16]


def read_choices(file: Path) -> ProductChoices:
    """What the file says, or nothing if there is none that can be read."""
    try:
        content = json.loads(file.read_text())
        if content.get("kernels") != kernel_set():
            logger.warning(
                "%s is ignored: it was measured with other kernels; measure again: ratoon bench products", file
            )
            return ProductChoices()
        return ProductChoices(_parse(content))
    except FileNotFoundError:
        return ProductChoices()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("%s is ignored, the fixed choices of products are used: %r", file, error)
        return ProductChoices()


def write_choices(file: Path, choices: ProductChoices) -> None:
    """Writes the file in one move, so that another process never reads half of it. A folder that can't be written is no
    error."""
    products = {key: None if tile is None else list(tile) for key, tile in sorted(choices.measured.items())}
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"kernels": kernel_set(), "products": products}, indent=1))
        temporary.replace(file)
    except OSError as error:
        logger.warning("the choices of products are not kept: %s", error)


def _parse(content: Any) -> dict[str, Choice]:
    return {str(key): _parse_choice(choice) for key, choice in content["products"].items()}


def _parse_choice(numbers: Any) -> Choice:
    if numbers is None:
        return None
    kind, limits = {  # powers of two where the limit is one
        3: (Tile, (16, 8192, 16)),
        4: (Panel, (64, 16, 4, 15)),
        5: (Stream, (256, 512, 15, 8, 15)),
        6: (Split, (128, 256, 256, 16, 16, 9)),
    }[len(numbers)]
    for number, limit in zip(numbers, limits, strict=True):
        if type(number) is not int or not 1 <= number <= limit or (number & (number - 1) and limit & (limit - 1) == 0):
            raise ValueError(f"{numbers!r} is no tile")
    choice = kind(*numbers)
    if isinstance(choice, Panel) and choice.outputs < PANEL_OUTPUTS * choice.out_warps:
        raise ValueError(f"{numbers!r} has more warps than outputs for them")
    if isinstance(choice, Stream) and (choice.num_warps < 4 or choice.outputs < 16 * choice.num_warps):
        raise ValueError(f"{numbers!r} has no group of warps, or more than outputs for them")
    if isinstance(choice, Stream) and choice.step_bytes < 128:
        raise ValueError(f"{numbers!r} has steps of less than 128 bytes")
    return choice
