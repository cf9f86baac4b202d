"""A real nats-server for the event plane's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import NatsServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of the test's own, which it may kill and start again."""
    own = NatsServer(tmp_path)
    own.start()
    yield own
    own.kill()
