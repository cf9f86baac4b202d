"""Child processes of `up`: events, ends, deaths, and what is left when the parent dies."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from warmroute.up import broker, ports
from warmroute.up.child import Child, Event
from warmroute.up.stack import Stack, StackError, read_event
from warmroute.up_config import UpConfig

READY = 'print(\'{"event": "ready", "address": "here"}\', flush=True)\n'
FOREVER = "import signal\nwhile True: signal.pause()\n"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


class Watched:
    """A child that runs a Python program, and all that was heard of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self, program: str) -> Child:
        return await Child.start(
            "child", [sys.executable, "-c", program], log=self.folder / "log", parse=read_event,
            on_event=lambda name, event: self.events.append(event),
            on_end=lambda child, status: self.end.set_result(status),
        )  # fmt: skip


async def test_events_are_heard_and_other_lines_go_to_the_log(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    child = await watched.start("print('hello')\nprint('{not an event')\nprint('{}')\n" + READY + FOREVER)
    assert (await child.ready)["address"] == "here"
    assert [event["event"] for event in watched.events] == ["ready"]
    await child.stop(5)
    assert child.tail() == ["hello", "{not an event", "{}"]
    assert await watched.end == -signal.SIGTERM


async def test_an_end_is_reported_with_its_status_and_the_last_lines_of_standard_error(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    child = await watched.start("import sys\nfor n in range(40): print(n, file=sys.stderr)\nsys.exit(7)\n")
    assert await watched.end == 7
    assert child.tail(3) == ["37", "38", "39"]
    assert not child.running


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    child = await watched.start(DEAF + READY + FOREVER)
    await child.ready
    await child.stop(0.2)
    assert await watched.end == -signal.SIGKILL


async def test_a_line_longer_than_any_event_is_no_reason_to_stop_reading(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    child = await watched.start("print('x' * 3_000_000)\n" + READY + FOREVER)
    await asyncio.wait_for(child.ready, 30)
    await child.stop(5)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ties children to their parent on Linux only")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    child_program = DEAF + READY + FOREVER
    parent = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from warmroute.up.child import Child\nfrom warmroute.up.stack import read_event\n"
        "async def main():\n"
        f"    child = await Child.start('child', [sys.executable, '-c', {child_program!r}],\n"
        f"        log=Path({str(tmp_path / 'log')!r}), parse=read_event,\n"
        "        on_event=lambda *_: None, on_end=lambda *_: None)\n"
        "    await child.ready\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait(10)
    process.stdout.close()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def until(true: Callable[[], bool], within_s: float = 10) -> None:
    """Wait for a condition that no event announces."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_a_taken_port_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ports.wanted_or_any("127.0.0.1", port) == 0
    assert ports.wanted_or_any("127.0.0.1", port) == port


async def test_a_real_broker_says_where_it_listens_and_moves_aside_when_its_port_is_taken(tmp_path: Path) -> None:
    brokers = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        child = await Child.start(
            "broker", broker.command(taken.getsockname()[1]), log=tmp_path / "log", parse=broker.LogReader(),
            on_event=lambda name, event: brokers.append(name), on_end=lambda child, status: None, merge_stderr=True,
        )  # fmt: skip
        address = str((await asyncio.wait_for(child.ready, 20))["address"])
        host, _, port = address.removeprefix("nats://").partition(":")
        assert host == "127.0.0.1"
        assert int(port) != taken.getsockname()[1]
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        await child.stop(5)
    assert brokers == ["broker"]


async def test_a_process_that_ends_gives_up_what_waits_for_the_stack_and_leaves_nothing(tmp_path: Path) -> None:
    stack = Stack(UpConfig(model=str(tmp_path / "no-model"), nats_port=0, port=0), tmp_path, lambda name, event: None)
    with pytest.raises(StackError) as error:
        await asyncio.wait_for(stack.start(), 60)
    assert error.value.child.name.startswith("worker-")
    await stack.stop()
    assert not any(psutil.pid_exists(child.pid) for child in stack.children)
    assert os.listdir(tmp_path)
