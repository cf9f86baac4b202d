"""The command `warmroute`: finds the subcommand and hands over; imports nothing heavy, so that help is instant."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEPENDENCY = 3
"""Something that the command needs is not installed or not reachable."""
EXIT_INTERRUPTED = 130


class Command(Protocol):
    """What a module under `warmroute.commands` offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags; must import neither torch nor aiohttp nor numba."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the result is the exit status."""


class _Entry(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "up": _Entry("warmroute.commands.up", "broker, workers and router on this machine, with a proof that they work"),
    "worker": _Entry("warmroute.commands.worker", "one worker: a model behind an OpenAI-compatible HTTP API"),
    "router": _Entry("warmroute.commands.router", "one router: sends each prompt to the worker that holds its prefix"),
    "version": _Entry("warmroute.commands.version", "the version of warmroute and of what it runs on"),
}

_EPILOG = """examples:
  warmroute up                                   everything on this machine
  warmroute up --once --json                     prove it, print one JSON object, end
  warmroute worker --model smollm2 --nats nats://broker:4222
  warmroute router --nats nats://broker:4222 --port 8000

exit status: 0 done, 1 failed, 2 wrong usage or settings, 3 something needed is missing, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the console script `warmroute` exits with the result."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name not in COMMANDS:
        return _without_command(words)
    entry = COMMANDS[name]
    command = cast(Command, import_module(entry.module))
    parser = argparse.ArgumentParser(
        prog=f"warmroute {name}",
        description=entry.summary[0].upper() + entry.summary[1:] + ".",
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(words[1:]))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        return _missing(error, name)


def _without_command(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="warmroute",
        usage="warmroute COMMAND [options]",
        description="Sends every prompt to the LLM worker that already holds its prefix.",
        epilog="commands:\n" + _command_list() + "\n\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    if not words:
        parser.print_help()
        return EXIT_USAGE
    if not words[0].startswith("-"):
        parser.error(_unknown_command(words[0]))
    if parser.parse_args(words).version:
        return main(["version"])
    return EXIT_OK


def _command_list() -> str:
    return "\n".join(f"  {name:<10} {entry.summary}" for name, entry in COMMANDS.items())


def _unknown_command(word: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean `warmroute {close[0]}`?" if close else f"commands: {', '.join(COMMANDS)}"
    return f"unknown command {word!r}; {hint}"


def _missing(error: ModuleNotFoundError, command: str) -> int:
    """A package of an extra that was not installed; anything else of ours that is missing is a defect and raises."""
    package = (error.name or "").partition(".")[0]
    extra = {"worker": "worker", "router": "router", "up": "demo"}.get(command)
    if extra is None or package in ("", "context", "kvevents", "serving", "worker", "router", "warmroute"):
        raise error
    sys.stderr.write(
        f"warmroute {command}: the package {package!r} is not installed; run: pip install 'warmroute[{extra}]'\n"
    )
    return EXIT_DEPENDENCY


if __name__ == "__main__":
    sys.exit(main())
