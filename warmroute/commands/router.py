"""`warmroute router`: one router process."""

import argparse

from router.config import RouterConfig
from warmroute.commands import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the router's settings."""
    settings.add_arguments(parser, RouterConfig)


def run(arguments: argparse.Namespace) -> int:
    """Run the router until a signal."""
    config = settings.read(arguments, RouterConfig)
    from router.main import run as run_router

    return run_router(config)
