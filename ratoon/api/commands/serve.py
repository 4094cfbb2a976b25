"""`ratoon serve MODEL…`: an OpenAI-compatible HTTP server, of one model or of several."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.api.adapter_options import add_served_adapters, served_adapters
from ratoon.api.commands.serve_models import NamedModel, named_models
from ratoon.api.options import (
    Subparsers,
    add_common_options,
    add_engine_options,
    add_setting_option,
    add_setting_options,
    engine_settings,
    given_settings,
    status,
)
from ratoon.api.parser import leave_out, show_everyday
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.setting import settings_of
from ratoon.core.settings import ENGINE_SETTINGS, FRONT_END_SETTINGS
from ratoon.core.vllm_names import VLLM_NAMES

if TYPE_CHECKING:
    from ratoon.api.server.model_host import ModelSpec

SERVER_SETTINGS = {setting.name: setting for setting in settings_of(ServerSettings)}
FRONT_END = {setting.name: setting for setting in FRONT_END_SETTINGS}
DEFAULTS = {"max_total_hidden_states_bytes": 2**30}  # clients may not read what they requested
# Settings of the server that `--help` shows.
EVERYDAY = {
    "host": "address to listen on; default 127.0.0.1",
    "port": "default 8000; 0: any free port",
    "api_servers": "processes that serve HTTP; default 1",
    "keep_alive": "put a model to sleep after so long idle, such as 5m",
    "memory_budget": "memory of all loaded models, such as 16GiB",
    "served_model_name": "the model's names in requests; default: its own",
    "tool_parser": "how the model writes tool calls; default auto",
    "reasoning_parser": "marks around its reasoning; default auto",
    "api_key": "a key that clients must send; may be repeated",
}
KEY_VARIABLE = "RATOON_API_KEY"
ADMIN_KEY_VARIABLE = "RATOON_ADMIN_KEY"
DESCRIPTION = f"""Serve models over HTTP, in OpenAI's protocol and others.

The server listens on 127.0.0.1 unless --host is given. API keys come from --api-key, --api-key-file and
the variable {KEY_VARIABLE} (several with commas); without any, every client that can reach the server may use it.
--admin serves /admin/…, which needs an admin key: --admin-key, --admin-key-file or {ADMIN_KEY_VARIABLE}.
SIGTERM or Ctrl-C ends it when running requests have finished; a second one ends it immediately.
With --nnodes and a --node-rank above 0, it serves nothing: it runs ranks for the server of node 0."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("serve", help="serve models over HTTP", description=DESCRIPTION)
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="a folder, a GGUF file, a hub id or a name",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with these options")
    add_server_options(parser)
    limits = parser.add_argument_group("limits")
    add_setting_options(limits, (one for one in SERVER_SETTINGS.values() if one.group == "limits"))
    leave_out(limits)
    add_log_options(parser)
    add_engine_options(parser, without=("served_model_name",))
    add_served_adapters(parser)
    engines = parser.add_argument_group("engines")
    add_setting_options(engines, [FRONT_END[name] for name in ("num_replicas", "ray", "seed")])
    apart = ("prefill_engines", "decode_engines", "encode_engines", "prefill_threshold")
    for name in ("data_parallel_external_lb", "balance_by_events", *apart, "move_roots"):
        leave_out(add_setting_option(engines, FRONT_END[name]))
    add_common_options(parser)
    model_options = {setting.name for setting in (*ENGINE_SETTINGS, *FRONT_END_SETTINGS)} | {"served_adapters"}
    parser.set_defaults(run=run, model=None, parser=parser, model_options=model_options | {*VLLM_NAMES})


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    for setting in SERVER_SETTINGS.values():
        if setting.group is None:
            several = {"action": "extend", "nargs": "+"} if setting.name == "served_model_name" else {}
            action = add_setting_option(group, setting, **several)
            if setting.name in EVERYDAY:
                show_everyday(action, EVERYDAY[setting.name])
    leave_out(group)
    group.add_argument("--api-key-file", metavar="FILE", help="a key on each line")
    group.add_argument("--admin-key-file", metavar="FILE", help="a key on each line")


def add_log_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("--log-level", metavar="NAME", help="debug, info, warning or error")
    group.add_argument("--log-file", metavar="FILE", help="write the log to this file, too")
    add_setting_options(group, [SERVER_SETTINGS["access_log"], FRONT_END["disable_log_stats"]])
    times = group.add_argument("--startup-times", action="store_true", help="print the time of each part of start-up")
    leave_out(times)


def run(args: argparse.Namespace) -> int:
    args, models = named_models(args)
    if args.node_rank:
        return run_ranks(args)
    try:
        from ratoon.api.server.runner import run_server
    except ImportError as error:
        raise ConfigError("serve", f"{error.name} is not installed", "pip install 'ratoon[serve]'") from None
    from ratoon.api.server.connections import address, bind, is_local
    from ratoon.api.server.runner import configure_server_logging
    from ratoon.engine.async_llm import AsyncLLM
    from ratoon.observe.metrics import EngineMetrics
    from ratoon.observe.startup import StartupTimer

    settings = server_settings(args)
    configure_server_logging(args.log_level, args.log_file, args.access_log)
    if len(models) > 1 or settings.keep_alive is not None or settings.memory_budget is not None:
        return run_several(args, models, settings)
    names = settings.served_names
    llm_settings = settings_of_engine(args, names)
    # In the process that serves HTTP; where there are several, only to check the settings.
    llm = AsyncLLM(args.model, metrics=EngineMetrics(names[0] if names else args.model), **llm_settings)
    bound = bind(settings)
    if not settings.api_keys and not is_local(bound):
        print(f"warning: {address(bound)} can be reached from other machines, and no API key is set", file=sys.stderr)
    loading = ExitStack()

    def tell_ready(model_name: str, timer: StartupTimer) -> None:
        loading.close()
        if args.startup_times:
            print(timer.table(), file=sys.stderr)
        where = address(bound)
        docs = "" if settings.uds is not None else f"; {where}/docs describes how to ask it"
        print(f"{where} serves {(names or (model_name,))[0]}{docs}", flush=True)

    def on_ready() -> None:
        if llm.tracer is not None and names:
            llm.tracer.model_name = names[0]
        tell_ready(llm.source.name, llm.startup_timer)

    def on_drain(num_prompts: int) -> None:
        say_what_is_waited_for(num_prompts, settings)

    with loading:
        loading.enter_context(status(f"loading {args.model}"))
        if settings.num_api_servers == 1:
            return run_server(llm, settings, bound, on_ready, on_drain)
        from ratoon.api.server.service import run_service

        return run_service(
            args.model,
            llm_settings,
            settings,
            bound,
            lambda service: tell_ready(service.model_name, service.startup_timer),
            on_drain,
        )


def settings_of_engine(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    given = DEFAULTS | given_settings(args, FRONT_END) | engine_settings(args)
    return given | served_adapters(args, names)


def run_several(args: argparse.Namespace, models: list[NamedModel], settings: ServerSettings) -> int:
    """Models that are loaded when they are asked for, and put away when they are idle."""
    from ratoon.api.server.connections import address, bind, is_local
    from ratoon.api.server.host_app import run_host

    if settings.num_api_servers > 1 or args.nnodes not in (None, 1):
        option = "api_servers" if settings.num_api_servers > 1 else "nnodes"
        raise ConfigError(option, "models that are loaded when they are asked for are served by one process", "1")
    specs = [model_spec(model, settings, len(models) == 1) for model in models]
    bound = bind(settings)
    where = address(bound)
    if not settings.api_keys and not is_local(bound):
        print(f"warning: {where} can be reached from other machines, and no API key is set", file=sys.stderr)
    docs = "" if settings.uds is not None else f"; {where}/docs describes how to ask it"
    served = ", ".join(spec.name for spec in specs)
    return run_host(
        specs,
        settings,
        bound,
        lambda: print(f"{where} serves {served}{docs}", flush=True),
        lambda num_prompts: say_what_is_waited_for(num_prompts, settings),
    )


def model_spec(model: NamedModel, settings: ServerSettings, is_only_one: bool) -> ModelSpec:
    """Checks a model's settings (ConfigError) and whether it is there (ModelError), and loads nothing."""
    from ratoon.api.server.model_host import ModelSpec
    from ratoon.api.server.model_slots import parse_keep_alive
    from ratoon.core.settings import configure
    from ratoon.models.installed import size_of_weights

    own = server_settings(model.args)
    names = own.served_names if is_only_one and own.served_names else (model.name, *model.further_names)
    llm_settings = settings_of_engine(model.args, names)
    _, config = configure(model.model, llm_settings)
    if llm_settings.get("kv_memory") is not None:
        llm_settings["kv_memory"] = config.cache.memory_bytes
    return ModelSpec(
        name=names[0],
        model=model.model,
        llm_settings=llm_settings,
        # -1: the routes should know that models are put away, if only to make room.
        settings=replace(own, served_names=names, keep_alive=own.keep_alive or "-1"),
        further_names=(*names[1:], *llm_settings.get("adapters", ())),
        weight_bytes=size_of_weights(model.model),
        keep_alive=parse_keep_alive(own.keep_alive) if "keep_alive" in model.own else None,
    )


def run_ranks(args: argparse.Namespace) -> int:
    """Another host than node 0: it serves no HTTP, and runs its ranks for node 0's engine until it gets a signal."""
    from ratoon.core.settings import engine_config
    from ratoon.distributed.node import run_node
    from ratoon.observe.logging import set_up_logging

    set_up_logging(args.log_level, args.log_file)
    config = engine_config(args.model, **engine_settings(args))
    print(f"node {config.node_rank} joins {config.master_addr}:{config.master_port}", flush=True)
    run_node(config)
    return 0


def say_what_is_waited_for(num_prompts: int, settings: ServerSettings) -> None:
    """Printed when the server begins to shut down."""
    if sys.stderr.isatty():
        print(file=sys.stderr)  # after the terminal's ^C
    if num_prompts == 0:
        print("ending: no requests are running", file=sys.stderr)
        return
    running = f"{num_prompts} request{'s' if num_prompts > 1 else ''} running"
    waiting = f"ending: waiting up to {settings.drain_seconds:g} s for {running}"
    print(f"{waiting}; a second Ctrl-C ends it at once", file=sys.stderr)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    given = given_settings(args, SERVER_SETTINGS)
    if "chat_template" in given:
        given["chat_template"] = read_template(given["chat_template"])
    given["api_key"] = find_keys("api_key_file", args.api_key, args.api_key_file, KEY_VARIABLE)
    given["admin_key"] = admin_keys(args)
    settings = ServerSettings(
        **{SERVER_SETTINGS[name].field: SERVER_SETTINGS[name].parse(given[name]) for name in given}
    )
    settings.verify()
    return settings


def read_template(path: str) -> str:
    """ConfigError for a template that fails for any conversation. Whether it suits the model is not checked."""
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
        raise ConfigError("admin_key", "has no effect without --admin", "add --admin, or leave the key out")
    return find_keys("admin_key_file", args.admin_key, args.admin_key_file, ADMIN_KEY_VARIABLE) if args.admin else []


def find_keys(file_setting: str, given: list[str] | None, file: str | None, variable: str) -> list[str]:
    """Keys of all three sources: options, a file, and an environment variable."""
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
