"""`warmroute worker`: one worker process."""

import argparse

from warmroute.commands import settings
from worker.config import WorkerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the worker's settings."""
    settings.add_arguments(parser, WorkerConfig)


def run(arguments: argparse.Namespace) -> int:
    """Run the worker until a signal."""
    config = settings.read(arguments, WorkerConfig)
    from worker.main import run as run_worker

    return run_worker(config)
