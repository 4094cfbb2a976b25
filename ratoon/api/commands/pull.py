"""`ratoon pull HUB_ID`: fetch a model of the Hugging Face hub into its cache, so that it starts without a network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options, status
from ratoon.core.errors import ModelError
from ratoon.core.sizes import format_size

if TYPE_CHECKING:
    from ratoon.models.hub import Watch

DESCRIPTION = """Download a model of the Hugging Face hub into its cache. Other commands do so too when given the id;
this one shows progress and does not load the model. Files in the cache are not downloaded again, and an
interrupted download is resumed. HF_HOME sets the cache directory, HF_TOKEN gives access to gated models."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("pull", help="fetch a model from the hub", description=DESCRIPTION)
    parser.add_argument("model", metavar="HUB_ID", help="such as Qwen/Qwen3-0.6B")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ratoon.models import hub
    from ratoon.models.hf_config import parse_hf_config
    from ratoon.models.tokenizer import read_json

    name, expected = args.model, "a hub id (org/name) such as Qwen/Qwen3-0.6B"
    if not hub.HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelError(name, "is no hub id", expected)
    with status(f"asking the hub for {name}"):
        total = sum(hub.file_sizes(name, expected).values())
    with download_bar(name, total) as watch, hub.watched(name, watch):
        # Unsupported families are refused before the weights are downloaded.
        parse_hf_config(read_json(hub.fetch_config(name, expected)), name)
        hub.verify_space(name, total - hub.num_bytes_cached(name))
        folder = hub.download(name, expected)
    print(f"{name}: {format_size(total)} in {folder}")
    return 0


@contextmanager
def download_bar(name: str, total: int) -> Iterator[Watch]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda num_bytes: bar.update(task, completed=min(num_bytes, total))
