"""`warmroute up`: broker, workers and router on this machine."""

import argparse

from warmroute.commands import settings
from warmroute.up_config import UpConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the settings of the whole stack."""
    settings.add_arguments(parser, UpConfig)


def run(arguments: argparse.Namespace) -> int:
    """Run the stack until a signal, or until the proof when `--once` is given."""
    config = settings.read(arguments, UpConfig)
    from warmroute.up.run import run as run_up

    return run_up(config)
