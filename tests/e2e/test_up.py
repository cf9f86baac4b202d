"""`warmroute up` as a user runs it: the proof, a clean end, and no quiet failure."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from warmroute.up.stack import read_event

from .processes import Running, until, warmroute


class Up:
    """A running `warmroute up` and what it printed."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._ready = threading.Event()
        self.process = Running(
            warmroute("up", "--port", "0", "--nats-port", "0", *words), folder / "up.log", parse=self._line,
            environ={"TMPDIR": str(self.temporary), "NO_COLOR": "1"},
        )  # fmt: skip

    def _line(self, line: str) -> None:
        if line.startswith("Ctrl-C"):
            self._ready.set()

    def wait_serving(self) -> None:
        """Until it says how to try it."""
        assert self._ready.wait(180), self.output

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.process.log.read_text()

    def children(self) -> list[psutil.Process]:
        """The processes of the stack."""
        return psutil.Process(self.process.popen.pid).children(recursive=True)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Up]:
    """A stack that serves, without the proof."""
    up = Up(tmp_path, "--no-proof")
    try:
        up.wait_serving()
        yield up
    finally:
        up.process.stop()


def test_once_proves_a_warm_answer_and_ends() -> None:
    done = subprocess.run(
        warmroute("up", "--once", "--json", "--port", "0", "--nats-port", "0"),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout.splitlines()[-1])
    assert set(proof) == {
        "cold_ttft_ms", "warm_ttft_ms", "speedup", "overlap_blocks", "cached_tokens", "worker", "text",
    }  # fmt: skip
    assert proof["speedup"] == pytest.approx(proof["cold_ttft_ms"] / proof["warm_ttft_ms"], rel=0.02)
    assert proof["speedup"] >= 10
    assert proof["cached_tokens"] == proof["overlap_blocks"] * 16 >= 1000
    assert len(re.findall(r"[A-Za-z]{2,}", proof["text"])) >= 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_every_process_and_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    up = Up(tmp_path, "--no-proof")
    up.wait_serving()
    children = up.children()
    assert len(children) == 4
    up.process.popen.send_signal(number)
    assert up.process.stop() == 0
    assert not [child for child in children if child.is_running()]
    assert os.listdir(up.temporary) == []


async def test_an_interruption_while_models_load_ends_everything_too(tmp_path: Path) -> None:
    up = Up(tmp_path)

    async def started() -> bool:
        return len(up.children()) == 4

    await until(started)
    up.process.popen.send_signal(signal.SIGINT)
    assert up.process.stop() == 130
    assert os.listdir(up.temporary) == []


def test_a_worker_that_dies_is_named_with_the_end_of_its_log_and_the_status_says_so(serving: Up) -> None:
    worker = next(child for child in serving.children() if "worker-1" in child.cmdline())
    worker.kill()
    assert serving.process.popen.wait(60) == 1
    serving.process.stop()
    assert "worker-1 was ended by SIGKILL" in serving.output
    assert "worker.loaded" in serving.output


async def test_nothing_outlives_an_up_that_is_killed(serving: Up) -> None:
    children = serving.children()
    assert len(children) == 4
    serving.process.kill()

    async def gone() -> bool:
        return not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]

    await until(gone)


def test_a_model_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(
        warmroute("up", "--once", "--model", "no-such-model", "--port", "0", "--nats-port", "0"),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"error: worker-\d ended with status 1", done.stderr)
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_events_are_lines_of_json_with_an_event() -> None:
    assert read_event('{"event": "ready"}') == {"event": "ready"}
    for line in ("ready", "{broken", "[]", '{"no": "event"}'):
        assert read_event(line) is None
