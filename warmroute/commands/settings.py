"""What the commands with settings share: --config, --print-config, and errors that end with status 2."""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from serving.config import ENV_PREFIX, ConfigError, Resolved, add_flags, resolve

T = TypeVar("T", bound=msgspec.Struct)

_FILE_VARIABLE = ENV_PREFIX + "CONFIG"
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def add_arguments(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """Flags for every field of `kind`, and the two that every command with settings has."""
    parser.add_argument("--config", metavar="FILE", help=f"TOML or YAML file with settings (also {_FILE_VARIABLE})")
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting and where it came from, and end"
    )
    add_flags(parser, kind)


def read(arguments: argparse.Namespace, kind: type[T]) -> T:
    """The settings of a command line.

    Ends the process with status 2 and one line on standard error when they cannot be used, and with status 0 after
    printing them when --print-config was given.
    """
    named = arguments.config or os.environ.get(_FILE_VARIABLE)
    try:
        resolved = resolve(kind, flags=vars(arguments), file=Path(named) if named else None, environ=os.environ)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error
    if arguments.print_config:
        sys.stdout.write(printed(resolved))
        raise SystemExit(0)
    return resolved.config


def printed(resolved: Resolved[Any]) -> str:
    """The settings as TOML lines with their source as a comment; credentials in URLs are hidden."""
    lines = []
    for origin in resolved.origins:
        value = getattr(resolved.config, origin.field)
        if value is None:
            lines.append(f"# {origin.field} is not set  ({origin.source})")
        else:
            lines.append(f"{origin.field} = {_toml(value)}  # {origin.source}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
        return "{ " + pairs + " }" if pairs else "{}"
    if isinstance(value, str):
        value = _PASSWORD_IN_URL.sub("***", value)
    return json.dumps(value, ensure_ascii=False)
