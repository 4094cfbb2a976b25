"""Errors of the command line name what was typed: `--json-schema`, not `structured_output.json_schema`."""

from __future__ import annotations

import argparse
import re

from ratoon.api.structured_options import fields_of_option
from ratoon.core.errors import ConfigError, RequestError

POSITIONAL = ("model", "prompts", "files", "run")
# What the engine calls the tokens of a prompt
PROMPTS = {
    "prompt": "PROMPT",
    "prompt_token_ids": "PROMPT",
    "encoder_prompt": "PROMPT",
    "encoder_prompt_token_ids": "PROMPT",
    "decoder_prompt_token_ids": "--decoder-prompt",
}
IN_A_LIST = re.compile(r"(?P<place>prompts\[\d+\])\.(?P<field>.+)", re.DOTALL)
FIELD_OF_SERVER = re.compile(r"(?P<field>[a-z_]+[\w.\[\]]*): (?P<rest>.+)", re.DOTALL)


def in_terms_of_options(error: Exception, args: argparse.Namespace) -> Exception:
    """An error that names a field of a request, or a setting, names the option that was given for it. Any other error
    as it is."""
    if not isinstance(error, (RequestError, ConfigError)):
        return error
    listed = IN_A_LIST.fullmatch(error.field)
    field = listed["field"] if listed else error.field
    if field in PROMPTS:
        place = listed["place"] if listed else PROMPTS[field]
        return RequestError(place, error.problem, in_options(error.expected))
    option = option_for(field, args)
    if option is not None:
        kind = ConfigError if isinstance(error, ConfigError) else RequestError
        return kind(f"{listed['place']}, {option}" if listed else option, error.problem, error.expected)
    told = FIELD_OF_SERVER.fullmatch(error.problem)  # a server's message begins with the field
    option = None if told is None else option_for(told["field"], args)
    if told is None or option is None:
        return error
    return RequestError(error.field, f"{option}: {told['rest']}", error.expected)


def in_options(expected: str) -> str:
    """What an error suggests, on the command line: settings are options there."""
    return expected.replace("start the engine with a greater max_model_len", "give a greater --max-model-len")


def option_for(field: str, args: argparse.Namespace) -> str | None:
    """The option that was given for a field; None: none was."""
    for dest, value in vars(args).items():
        if value is None or value is False or dest in POSITIONAL:
            continue
        for name in (dest, *fields_of_option(dest)):
            if field == name or field.startswith((f"{name}.", f"{name}[")):
                return "--" + dest.replace("_", "-")
    return None
