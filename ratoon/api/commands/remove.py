"""`ratoon rm HUB_ID`: delete a model from the hub's cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from ratoon.api.options import Subparsers, add_common_options
from ratoon.core.errors import ModelError
from ratoon.core.sizes import format_size

DESCRIPTION = """Delete a model from the cache of the Hugging Face hub (HF_HOME), where `ratoon pull` puts it. Files
that other revisions share stay. Folders and files of your own are not touched."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("rm", help="delete a model that was fetched from the hub", description=DESCRIPTION)
    parser.add_argument("models", metavar="HUB_ID", nargs="+", help="as `ratoon list` shows it")
    parser.add_argument("--revision", metavar="NAME", help="only this branch, tag or commit; default: all of it")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ratoon.models.hub import remove

    for name in args.models:
        if Path(name).expanduser().exists():
            raise ModelError(name, "is a file or a folder here, and not of the hub's cache", f"delete it: rm -r {name}")
        print(f"{name}: {format_size(remove(name, args.revision))} freed")
    return 0
