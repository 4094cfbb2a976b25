"""`ratoon bench products MODEL`: which kernels multiply fastest on this GPU in the shapes of a model, kept for engines.

The parser and the table. What is measured is in layers/product_measurement.py.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options
from ratoon.core.errors import ConfigError

if TYPE_CHECKING:
    from ratoon.layers.product_measurement import Measured

DESCRIPTION = """Time the matrix products of a model on this GPU, for 1 to 64 rows, by Ratoon's kernels and by cuBLAS.

The fastest for each shape and number of rows is kept in the user's cache folder, where engines on the same GPU, with
the same kernels and versions of torch and Triton, find it. Without it they choose by fixed rules. No weights are
needed: the config of a model is enough."""


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser("products", help="which kernels are fastest on this GPU", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda or cuda:N (default cuda)")
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="of the weights (default: that of the model)")
    parser.add_argument(
        "--quantization", choices=["none", "fp8"], default="none", help="of the weights (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ratoon.execution.devices import resolve_device, resolve_dtype
    from ratoon.layers import fp8
    from ratoon.layers.gpu import has_wgmma
    from ratoon.layers.product_choices import choices_file, dtype_name, read_choices, write_choices
    from ratoon.layers.product_measurement import GraphTimer, as_choices, keys_of, measure_products
    from ratoon.models.build import collect_products
    from ratoon.models.source import resolve_model

    device = resolve_device(args.device)
    if device.type != "cuda":
        raise ConfigError("--device", f"{args.device!r} has no choice of kernels", "a CUDA device")
    config = resolve_model(args.model).config
    dtype = dtype_name(fp8.DTYPE if args.quantization == "fp8" else resolve_dtype(args.dtype, device, config))
    keys = [key for product in collect_products(config) for key in keys_of(*product, dtype)]
    measured: list[Measured] = []
    for one in measure_products(keys, GraphTimer(device), has_wgmma()):
        measured.append(one)
        if not args.json:
            print(format_row(one), flush=True)
    file = choices_file(device)
    kept = read_choices(file)
    kept.measured.update(as_choices(measured).measured)
    write_choices(file, kept)
    if args.json:
        rows = [
            {"product": str(one.key), "library_us": one.library, "best_us": one.best_time, "choice": one.best}
            for one in measured
        ]
        print(json.dumps({"model": args.model, "file": str(file), "products": rows}, indent=2))
    else:
        print(f"\nKept in {file}")
    return 0


def format_row(one: Measured) -> str:
    choice = "cuBLAS" if one.best is None else f"{type(one.best).__name__.lower()} {'x'.join(map(str, one.best))}"
    return f"{one.key!s:40} cuBLAS {one.library:8.2f} µs   best {one.best_time:8.2f} µs   {choice}"
