"""`ratoon serve MODEL`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, engine_settings, status
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.sizes import parse_size

if TYPE_CHECKING:
    from ratoon.api.server.settings import ServerSettings

KEY_VARIABLE = "RATOON_API_KEY"
ADMIN_KEY_VARIABLE = "RATOON_ADMIN_KEY"
DESCRIPTION = f"""Serve a model over HTTP, in OpenAI's protocol.

The server listens on this machine only, until --host says otherwise. API keys come from --api-key, --api-key-file and
the variable {KEY_VARIABLE} (several with commas); without any, everybody who reaches the server may use it.
--admin serves /admin/…, for an admin key of its own alone: --admin-key, --admin-key-file or {ADMIN_KEY_VARIABLE}.
SIGTERM or Ctrl-C ends it once what is under way has finished; a second one ends it at once."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument(
        "--replicas",
        "--data-parallel-size",
        "-dp",
        type=int,
        default=1,
        metavar="N",
        help="engines, each with the whole model",
    )
    add_server_options(parser)
    add_limit_options(parser)
    add_log_options(parser)
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default 127.0.0.1: this machine only")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000; 0 takes any free one")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument(
        "--served-model-name", action="extend", nargs="+", metavar="NAME", help="one or more; the first leads"
    )
    group.add_argument("--api-key", action="append", metavar="KEY", help="may be repeated; visible in the process list")
    group.add_argument("--api-key-file", metavar="FILE", help="a key on each line")
    group.add_argument(
        "--allow-host", action="append", metavar="NAME", help="take requests for this host name, too; may be repeated"
    )
    group.add_argument("--cors-origin", action="append", metavar="ORIGIN", help="web pages of this origin may ask")
    group.add_argument("--chat-template", metavar="FILE", help="use this template instead of the model's own")
    group.add_argument("--allow-request-template", action="store_true", help="requests may bring a chat template")
    group.add_argument("--lenient", action="store_true", help="ignore unknown fields of requests")
    group.add_argument("--admin", action="store_true", help="serve /admin/…, which needs a key of its own")
    group.add_argument(
        "--admin-key", action="append", metavar="KEY", help="may be repeated; visible in the process list"
    )
    group.add_argument("--admin-key-file", metavar="FILE", help="a key on each line")
    group.add_argument("--drain-seconds", type=float, default=30.0, metavar="X", help="time to finish at shutdown")


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument("--max-body", default="16MiB", metavar="SIZE", help="largest body; default 16MiB")
    group.add_argument("--max-audio", default="64MiB", metavar="SIZE", help="largest recording; default 64MiB")
    group.add_argument(
        "--max-audio-seconds", type=float, default=7200.0, metavar="X", help="longest recording; default 7200"
    )
    group.add_argument(
        "--write-timeout", type=float, default=60.0, metavar="X", help="seconds that a client may not read; default 60"
    )
    group.add_argument(
        "--max-total-hidden-states-bytes",
        default="1GiB",
        metavar="SIZE",
        help="hidden states that clients have not read yet; default 1GiB",
    )
    group.add_argument("--max-batch", type=int, default=256, metavar="N", help="prompts in a request; default 256")
    group.add_argument(
        "--max-request-tokens", type=int, default=2**20, metavar="N", help="prompts × n × max_tokens; default 1048576"
    )
    group.add_argument("--max-queue", type=int, default=4096, metavar="N", help="unfinished prompts; default 4096")


def add_log_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("--log-level", metavar="NAME", help="debug, info, warning or error")
    group.add_argument("--log-file", metavar="FILE", help="write the log to this file, too")
    group.add_argument("--access-log", action="store_true", help="a line for every request")
    group.add_argument(
        "--disable-log-stats", action="store_true", help="no line with the throughput every ten seconds of work"
    )
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send spans of requests to this OpenTelemetry collector"
    )
    group.add_argument("--startup-times", action="store_true", help="show what start-up spent its time on")


def run(args: argparse.Namespace) -> int:
    try:
        from ratoon.api.server.runner import run_server
    except ImportError as error:
        raise ConfigError("serve", f"{error.name} is not installed", "pip install 'ratoon[serve]'") from None
    from ratoon.api.server.listening import address, bind, is_local
    from ratoon.api.server.logs import configure_server_logging
    from ratoon.engine.async_llm import AsyncLLM
    from ratoon.observe.metrics import EngineMetrics

    settings = server_settings(args)
    configure_server_logging(args.log_level, args.log_file, args.access_log)
    names = settings.served_names
    llm = AsyncLLM(
        args.model,
        num_replicas=args.replicas,
        max_total_hidden_states_bytes=settings.max_total_hidden_states_bytes,
        metrics=EngineMetrics(names[0] if names else args.model),
        disable_log_stats=args.disable_log_stats,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        **engine_settings(args),
    )
    bound = bind(settings)
    if not settings.api_keys and not is_local(bound):
        print(f"warning: {address(bound)} can be reached from other machines, and no API key is set", file=sys.stderr)
    loading = ExitStack()

    def on_ready() -> None:
        loading.close()
        if llm.tracer is not None and names:
            llm.tracer.model_name = names[0]
        if args.startup_times:
            print(llm.startup_timer.table(), file=sys.stderr)
        where = address(bound)
        docs = "" if settings.uds is not None else f"; {where}/docs describes how to ask it"
        print(f"{where} serves {(names or (llm.source.name,))[0]}{docs}", flush=True)

    with loading:
        loading.enter_context(status(f"loading {args.model}"))
        return run_server(llm, settings, bound, on_ready, lambda num_prompts: say_what_is_waited_for(num_prompts, args))


def say_what_is_waited_for(num_prompts: int, args: argparse.Namespace) -> None:
    """Printed when the server was asked to end, so that Ctrl-C is never met by silence."""
    if sys.stderr.isatty():
        print(file=sys.stderr)  # the terminal's ^C stands on this line
    if num_prompts == 0:
        print("ending: nothing is under way", file=sys.stderr)
        return
    running = f"{num_prompts} request{'s' if num_prompts > 1 else ''} running"
    waiting = f"ending: waiting up to {args.drain_seconds:g} s for {running}"
    print(f"{waiting}; a second Ctrl-C ends it at once", file=sys.stderr)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    from ratoon.api.server.settings import ServerSettings

    settings = ServerSettings(
        host=args.host,
        port=args.port,
        uds=args.uds,
        served_names=tuple(args.served_model_name or ()),
        chat_template=None if args.chat_template is None else read_template(args.chat_template),
        allow_request_template=args.allow_request_template,
        lenient=args.lenient,
        admin=args.admin,
        api_keys=tuple(find_keys("api_key_file", args.api_key, args.api_key_file, KEY_VARIABLE)),
        admin_keys=tuple(admin_keys(args)),
        allowed_hosts=tuple(args.allow_host or ()),
        cors_origins=tuple(args.cors_origin or ()),
        max_body=parse_size("max_body", args.max_body),
        max_audio=parse_size("max_audio", args.max_audio),
        max_audio_seconds=args.max_audio_seconds,
        write_timeout=args.write_timeout,
        max_total_hidden_states_bytes=parse_size("max_total_hidden_states_bytes", args.max_total_hidden_states_bytes),
        max_batch=args.max_batch,
        max_request_tokens=args.max_request_tokens,
        max_queue=args.max_queue,
        drain_seconds=args.drain_seconds,
        access_log=args.access_log,
    )
    settings.verify()
    return settings


def read_template(path: str) -> str:
    """ConfigError for one that no conversation could pass. Whether it fits the model is seen with the first one."""
    from ratoon.models.chat_template import render_chat_template

    template = read_text("chat_template", path)
    try:
        render_chat_template(template, [{"role": "user", "content": "Hello"}], {"add_generation_prompt": True})
    except RequestError as error:
        if error.field == "chat_template":
            raise ConfigError("chat_template", f"{path} {error.problem}", error.expected) from None
    return template


def admin_keys(args: argparse.Namespace) -> list[str]:
    if not args.admin and (args.admin_key or args.admin_key_file):
        raise ConfigError("admin_key", "opens nothing without --admin", "add --admin, or leave the key out")
    return find_keys("admin_key_file", args.admin_key, args.admin_key_file, ADMIN_KEY_VARIABLE) if args.admin else []


def find_keys(file_setting: str, given: list[str] | None, file: str | None, variable: str) -> list[str]:
    """Keys of all three places: options, a file, and a variable of the environment."""
    keys = list(given or ())
    if file is not None:
        found = [line.strip() for line in read_text(file_setting, file).splitlines()]
        found = [line for line in found if line and not line.startswith("#")]
        if not found:
            raise ConfigError(file_setting, f"{file} has no key", "a key on each line")
        keys += found
    from_environment = os.environ.get(variable, "")
    keys += [key.strip() for key in from_environment.split(",") if key.strip()]
    return list(dict.fromkeys(keys))


def read_text(setting: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(setting, f"can't read {path}: {error}", "a text file") from None
