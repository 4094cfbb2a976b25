"""Command-line options of commands that use a server, and the parts of a request that they become."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ratoon.api.beam_options import beam_fields, given_options, wants_beam_search
from ratoon.api.options import SAMPLING_OPTIONS, engine_settings
from ratoon.api.structured_options import structured_fields
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.api.remote.client import RemoteClient

DEFAULT_URL = "http://127.0.0.1:8000"  # where `ratoon serve` listens
KEY_VARIABLES = ("RATOON_API_KEY", "OPENAI_API_KEY")


def add_remote_options(parser: argparse.ArgumentParser, always: bool) -> None:
    """`always`: the command has no model of its own, so that it asks the usual server unless another is named."""
    group = parser.add_argument_group("server")
    default = DEFAULT_URL if always else None
    help = "an OpenAI-compatible server" + (f"; default {DEFAULT_URL}" if always else "")
    group.add_argument("--url", default=default, metavar="URL", help=help)
    group.add_argument(
        "--model", dest="remote_model", metavar="NAME", help="the model's name (default: the server's first)"
    )
    variables = " or ".join(KEY_VARIABLES)
    group.add_argument("--api-key", metavar="KEY", help=f"the server's key (also: {variables} in the environment)")


def open_client(args: argparse.Namespace, timeout: float | None = None) -> RemoteClient:
    from ratoon.api.remote.client import RemoteClient

    return RemoteClient(args.url, args.api_key or _key_of_environment(), timeout)


def _key_of_environment() -> str | None:
    """`serve` reads several keys from the same variable, separated by commas: the first one is used."""
    found = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return None if found is None else found.split(",")[0].strip()


def refuse_engine_options(args: argparse.Namespace) -> None:
    if settings := engine_settings(args):
        option = "--" + next(iter(settings)).replace("_", "-")
        raise RequestError(option, "is a setting of the server", "leave it out with --url")


async def choose_model(client: RemoteClient, name: str | None) -> str:
    """The name that was given, unchecked; else the first model that the server lists."""
    if name is not None:
        return name
    from ratoon.api.remote.client import RefusedError

    names: list[str] = []
    try:
        names = await client.models()
    except RefusedError as error:
        if error.status != 404:
            raise
    if not names:
        raise RequestError("--model", "is missing, and the server lists no model", "the name of a model")
    return names[0]


def generation_fields(args: argparse.Namespace, chat: bool) -> dict[str, Any]:
    """Fields of a request body, from the options that were given. The rest are the server's defaults."""
    if wants_beam_search(args):
        return {**beam_fields(args), **structured_fields(args)}
    fields = {**given_options(args, SAMPLING_OPTIONS), **structured_fields(args)}
    if chat and "logprobs" in fields:
        fields["top_logprobs"] = fields.pop("logprobs")
        fields["logprobs"] = True
    return fields
