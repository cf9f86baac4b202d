"""One fleet for all tests that do not destroy it: starting a model takes seconds."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from .processes import Fleet, fleet

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts real processes; `make test` runs it apart, one after the other."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A broker, a router, and the workers "a" and "b" with the real small model."""
    with fleet(tmp_path_factory.mktemp("fleet"), "a", "b") as started:
        yield started


@pytest.fixture
async def client(shared_fleet: Fleet) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the shared fleet's router, all of whose workers take prompts."""
    await shared_fleet.wait_all_take_prompts()
    async with aiohttp.ClientSession(shared_fleet.router, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session
