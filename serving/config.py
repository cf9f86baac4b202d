"""Fills one typed settings object from flags, environment, a file and defaults, in that order of precedence."""

import argparse
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec

ENV_PREFIX = "WARMROUTE_"

T = TypeVar("T", bound=msgspec.Struct)


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the field, the value, where it came from and the remedy."""


class Origin(NamedTuple):
    """Where the value of one field came from: "flag --port", "WARMROUTE_PORT", "config.toml" or "default"."""

    field: str
    source: str


class Resolved(NamedTuple, Generic[T]):
    """A settings object and the source of each of its values."""

    config: T
    origins: tuple[Origin, ...]


class _Field(NamedTuple):
    name: str
    type: Any
    """As annotated, constraints included; what values are converted to."""
    plain: Any
    """The type without `Annotated` and without `None`."""
    help: str
    default: Any
    required: bool


def load(
    kind: type[T],
    *,
    flags: Mapping[str, Any],
    file: Path | None = None,
    environ: Mapping[str, str],
    env_prefix: str = ENV_PREFIX,
) -> T:
    """A `kind` from, in order of precedence: `flags` (given ones only), `environ`, `file`, the defaults.

    `flags` maps field names to values, as `add_flags` leaves them in the namespace; keys that are no field are
    ignored.  `environ` is read at `env_prefix` + the field's name in upper case; other variables are ignored, since
    several components share the prefix.  `file` is TOML or YAML (by its suffix), and every key of it must be a field.

    Raises `ConfigError`.
    """
    return resolve(kind, flags=flags, file=file, environ=environ, env_prefix=env_prefix).config


def resolve(
    kind: type[T],
    *,
    flags: Mapping[str, Any],
    file: Path | None = None,
    environ: Mapping[str, str],
    env_prefix: str = ENV_PREFIX,
) -> Resolved[T]:
    """Like `load`, with the source of every value."""
    fields = _fields(kind)
    from_file = _read_file(file, fields) if file is not None else {}
    values: dict[str, Any] = {}
    origins: list[Origin] = []
    for field in fields:
        variable = env_prefix + field.name.upper()
        if field.name in flags:
            raw, source = flags[field.name], f"flag {flag_of(field.name)}"
        elif variable in environ:
            raw, source = environ[variable], variable
        elif field.name in from_file:
            raw, source = from_file[field.name], str(file)
        elif field.required:
            raise ConfigError(
                f"{field.name} is not set ({field.help or 'required'}); "
                f"give {flag_of(field.name)}, {variable} or `{field.name}` in a configuration file"
            )
        else:
            origins.append(Origin(field.name, "default"))
            continue
        values[field.name] = _convert(raw, field, source, env_prefix)
        origins.append(Origin(field.name, source))
    try:
        return Resolved(kind(**values), tuple(origins))
    except ValueError as error:
        raise ConfigError(f"settings do not fit together: {error}") from error


def add_flags(parser: argparse.ArgumentParser, kind: type[msgspec.Struct], *, env_prefix: str = ENV_PREFIX) -> None:
    """One flag a field of `kind`: `--block-size-tokens 16`, `--log-json` / `--no-log-json`, and for mappings a
    repeatable `--tokenizers NAME=VALUE`.

    A flag that is not given leaves nothing in the namespace.  Values stay text: `load` converts and checks them, so
    that flags, environment and files give the same errors.
    """
    group = parser.add_argument_group(
        "settings", f"each also as {env_prefix}NAME in the environment and as a key of the --config file"
    )
    for field in _fields(kind):
        text = _flag_help(field)
        names = [flag_of(field.name)]
        if field.plain is bool:
            group.add_argument(
                *names, dest=field.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        elif _is_mapping(field):
            group.add_argument(
                *names, dest=field.name, action="append", metavar="NAME=VALUE", default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(*names, dest=field.name, metavar=_metavar(field), default=argparse.SUPPRESS, help=text)


def flag_of(name: str) -> str:
    """The flag of a field: "max_tokens" -> "--max-tokens"."""
    return "--" + name.replace("_", "-")


def describe(kind: type[msgspec.Struct], *, env_prefix: str = ENV_PREFIX) -> list[tuple[str, str, str, str, str]]:
    """Rows (field, flag, environment variable, default, help) for the configuration reference."""
    return [
        (field.name, flag_of(field.name), env_prefix + field.name.upper(), _default_text(field), field.help)
        for field in _fields(kind)
    ]


def _fields(kind: type[msgspec.Struct]) -> list[_Field]:
    fields = []
    for info in msgspec.structs.fields(kind):
        plain, text = info.type, ""
        if get_origin(plain) is Annotated:
            plain, *extras = get_args(plain)
            text = next((e.description for e in extras if isinstance(e, msgspec.Meta) and e.description), "")
        if get_origin(plain) in (Union, UnionType):
            inner = [part for part in get_args(plain) if part is not NoneType]
            plain = inner[0] if len(inner) == 1 else plain
        default = info.default
        if default is msgspec.NODEFAULT and info.default_factory is not msgspec.NODEFAULT:
            default = info.default_factory()
        fields.append(_Field(info.name, info.type, plain, text, default, info.required))
    return fields


def _convert(raw: Any, field: _Field, source: str, env_prefix: str) -> Any:
    if _is_mapping(field) and isinstance(raw, (str, list)):
        raw = _pairs(raw, field, source)
    try:
        return msgspec.convert(raw, field.type, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error)[:1].lower() + str(error)[1:]
        raise ConfigError(
            f"{field.name}={raw!r} (from {source}) cannot be used: {reason}; "
            f"{field.help or field.name}; give a fitting value with {flag_of(field.name)}, "
            f"{env_prefix}{field.name.upper()} or in the configuration file (default: {_default_text(field)})"
        ) from error


def _pairs(raw: str | list[str], field: _Field, source: str) -> dict[str, str]:
    """A mapping from "a=b,c=d" (environment) or ["a=b", "c=d"] (repeated flag)."""
    parts = [part for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
    pairs = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ConfigError(
                f"{field.name}: {part!r} (from {source}) is no NAME=VALUE pair; write for example "
                f"{flag_of(field.name)} name=value"
            )
        pairs[name.strip()] = value.strip()
    return pairs


def _read_file(path: Path, fields: list[_Field]) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"configuration file {str(path)!r} cannot be read: {error.strerror}; check --config"
        ) from error
    try:
        if path.suffix.lower() in (".yaml", ".yml"):
            content = msgspec.yaml.decode(data)
        else:
            content = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {str(path)!r} is not valid: {error}; it is read as YAML when its name ends in "
            ".yaml or .yml, else as TOML"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"configuration file {str(path)!r} must hold a table of settings, not a {type(content).__name__}"
        )
    known = [field.name for field in fields]
    for key in content:
        if key not in known:
            _unknown_key(str(key), known, path)
    return content


def _unknown_key(key: str, known: list[str], path: Path) -> NoReturn:
    close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"
    raise ConfigError(f"{path}: `{key}` is no setting of this command; {hint}")


def _is_mapping(field: _Field) -> bool:
    return field.plain is dict or get_origin(field.plain) is dict


def _metavar(field: _Field) -> str:
    if get_origin(field.plain) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(field.plain)) + "}"
    return {int: "N", float: "X", str: "TEXT"}.get(field.plain, "VALUE")


def _flag_help(field: _Field) -> str:
    text = f"{field.help} (default: {_default_text(field)})" if field.help else f"default: {_default_text(field)}"
    return text.replace("%", "%%")


def _default_text(field: _Field) -> str:
    if field.required:
        return "required"
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if field.default == "" or field.default == {}:
        return "empty"
    return str(field.default)
