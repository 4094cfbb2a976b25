"""`ratoon pull HUB_ID`: fetch a model of the Hugging Face hub into its cache, so that it starts without a network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options, status
from ratoon.core.errors import ModelError
from ratoon.core.sizes import format_size
from ratoon.core.suggestions import did_you_mean

if TYPE_CHECKING:
    from ratoon.models.hub import HubFile, Watch

DESCRIPTION = """Download a model of the Hugging Face hub into its cache. Other commands do so too when given the id;
this one shows progress and does not load the model. Files in the cache are not downloaded again, and an
interrupted download is resumed. Files are compared with the hub's checksums. HF_HOME sets the cache directory,
HF_TOKEN gives access to gated models."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("pull", help="fetch a model from the hub", description=DESCRIPTION)
    parser.add_argument("model", metavar="HUB_ID", help="such as Qwen/Qwen3-0.6B")
    parser.add_argument("--revision", metavar="NAME", help="a branch, a tag or a commit; default: main")
    parser.add_argument("--file", metavar="NAME.gguf", help="fetch only this GGUF file")
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
        files = hub.files_of(name, expected, args.revision)
    chosen = one_file(name, files, args.file) if args.file is not None else hub.wanted_files(name, files)
    total = sum(file.size for file in chosen.values())
    with download_bar(name, total) as watch, hub.watched(name, watch):
        if args.file is None:
            # Unsupported families are refused before the weights are downloaded.
            parse_hf_config(read_json(hub.fetch_config(name, expected, args.revision)), name)
        hub.verify_space(name, total - hub.num_bytes_cached(name))
        hub.fetch_resumably(name, chosen, expected, args.revision)
        if args.file is None:
            place = hub.download(name, expected, args.revision)
            paths = {place / path: file for path, file in chosen.items()}
        else:
            place = hub.download_file(name, args.file, expected, args.revision)
            paths = {place: chosen[args.file]}
    with status("comparing checksums"):
        num_compared = hub.verify_checksums(name, paths)
    checked = f", {num_compared} checksum{'s' if num_compared > 1 else ''} compared" if num_compared else ""
    print(f"{name}: {format_size(total)}{checked} in {place}")
    return 0


def one_file(name: str, files: Mapping[str, HubFile], wanted: str) -> dict[str, HubFile]:
    """The GGUF file that was asked for. ModelError: the repository has none of this name."""
    gguf = sorted(path for path in files if path.endswith(".gguf"))
    if wanted not in gguf:
        listed = did_you_mean(wanted, gguf, f"one of {', '.join(gguf)}") if gguf else "a repository with GGUF files"
        raise ModelError(name, f"has no GGUF file {wanted!r}", listed)
    return {wanted: files[wanted]}


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
