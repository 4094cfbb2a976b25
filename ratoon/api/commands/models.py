"""`ratoon models [FOLDER…]`: which models are on this machine, how they run, and whether one would."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, engine_settings, status
from ratoon.core.sizes import format_size

if TYPE_CHECKING:
    from ratoon.models.installed import InstalledModel

DESCRIPTION = """List the models on this machine: embedded ones, the hub's cache (HF_HOME), and those in the given
folders and in the variable RATOON_MODELS (separated by colons). The first column is the name to use as MODEL.
With --check, say how one model would run, from its config alone: which backend, kernels, memory; or why it can't."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("models", help="list the models on this machine", description=DESCRIPTION)
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help="look for models here, too")
    parser.add_argument("--families", action="store_true", help="list the families that can be loaded instead")
    parser.add_argument(
        "--check",
        metavar="MODEL",
        help="a folder, a config.json, a GGUF file, a hub id: how it would run; loads nothing",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each")
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.families:
        print_families(args.json)
        return 0
    if args.check is not None:
        print_check(args)
        return 0
    from ratoon.models.installed import installed_models

    models = installed_models(args.folders)
    if args.json:
        for model in models:
            print(json.dumps(asdict(model), ensure_ascii=False))
        return 0
    print_table(models)
    return 0


def print_families(as_json: bool) -> None:
    from ratoon.models.families import FAMILIES, LIBRARY_FAMILIES
    from ratoon.models.speeds import speeds_of

    tested = f"through the Transformers library, slower, among others: {', '.join(LIBRARY_FAMILIES)}"
    for family in FAMILIES:
        gguf, notes = family.gguf.replace("`", ""), family.notes.replace("`", "")
        speeds = [speed.text() for name in family.architectures for speed in speeds_of(name)]
        if as_json:
            facts = {"architectures": family.architectures, "gguf": gguf or None, "notes": notes, "backend": "native"}
            print(json.dumps(facts | {"speeds": speeds}, ensure_ascii=False))
            continue
        print(", ".join(family.architectures) + (f" (GGUF: {gguf})" if gguf else ""))
        if notes:
            print(f"    {notes}")
        for speed in speeds:
            print(f"    measured: {speed}")
    if as_json:
        for name in LIBRARY_FAMILIES:
            others = {"architectures": [name], "gguf": None, "notes": "", "backend": "transformers", "speeds": []}
            print(json.dumps(others))
    else:
        print(tested)


def print_check(args: argparse.Namespace) -> None:
    from ratoon.core.settings import configure
    from ratoon.engine.model_check import check_model

    with status(f"reading the config of {args.check}"):
        _, config = configure(args.check, engine_settings(args))
        found = asdict(check_model(config))
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    by = "natively" if found["backend"] == "native" else "through the Transformers library, slower than a native model"
    print(f"{found['model']}: {found['architecture']} runs {by}")
    rows = [
        ("device", f"{found['device']}, {found['dtype']}"),
        ("products", found["products"]),
        *(("attention of " + layers, backend) for layers, backend in found["attention"].items()),
        ("weights", f"{found['num_weights']:,} numbers, {format_size(found['weight_bytes'])} in {found['dtype']}"),
        ("files", found["weights"]),
        ("KV cache", f"{format_size(found['kv_bytes_per_token'])} a token; up to {found['max_model_len']:,} tokens"),
        *(("measured", speed) for speed in found["speeds"]),
    ]
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"  {label:<{width}}  {text}")


def print_table(models: list[InstalledModel]) -> None:
    rows = [("model", "kind", "size", "")]
    for model in models:
        size = format_size(model.size) if model.size else "-"
        how = " (Transformers library)" if model.backend == "transformers" else ""
        rows.append((model.name, model.kind, size, model.note or f"{model.architecture or ''}{how}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, kind, size, text in rows:
        print(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {text}".rstrip())
