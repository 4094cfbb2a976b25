"""`ratoon models [FOLDER…]`: which models are on this machine, and how large they are."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options
from ratoon.core.sizes import format_size

if TYPE_CHECKING:
    from ratoon.models.installed import InstalledModel

DESCRIPTION = """List the models on this machine: embedded ones, the hub's cache (HF_HOME), and those in the given
folders and in the variable RATOON_MODELS (separated by colons). The first column is the name to use as MODEL."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("models", help="list the models on this machine", description=DESCRIPTION)
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help="look for models here, too")
    parser.add_argument("--families", action="store_true", help="list the families that can be loaded instead")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.families:
        print_families(args.json)
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
    from ratoon.models.families import FAMILIES

    for family in FAMILIES:
        gguf, notes = family.gguf.replace("`", ""), family.notes.replace("`", "")
        if as_json:
            shown = {"architectures": family.architectures, "gguf": gguf or None, "notes": notes}
            print(json.dumps(shown, ensure_ascii=False))
            continue
        print(", ".join(family.architectures) + (f" (GGUF: {gguf})" if gguf else ""))
        if notes:
            print(f"    {notes}")


def print_table(models: list[InstalledModel]) -> None:
    rows = [("model", "kind", "size", "")]
    for model in models:
        size = format_size(model.size) if model.size else "-"
        rows.append((model.name, model.kind, size, model.note or model.architecture or ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, kind, size, text in rows:
        print(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {text}".rstrip())
