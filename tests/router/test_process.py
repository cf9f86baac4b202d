"""One router process: comes up without its bus, finds it later, says why it is not ready, drains at
SIGTERM.
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from warmroute.up import broker

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def router_process(nats: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    code = (
        "import sys; from router.main import run; from router.config import RouterConfig;"
        f"sys.exit(run(RouterConfig(port=0, nats={nats!r}, drain_s=2)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert (told["event"], told["component"]) == ("ready", "router")
        yield process, told["address"]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def get(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_router_without_its_bus_lives_says_why_it_is_not_ready_and_recovers(tmp_path: Path) -> None:
    port = free_port()
    with router_process(f"nats://127.0.0.1:{port}") as (process, address):
        assert get(address + "/live")[0] == 200
        status, told = get(address + "/ready")
        assert status == 503
        assert "bus is not connected" in told["why_not"]
        status, told = get(address + "/v1/models")
        assert (status, told["data"]) == (200, [])
        server = subprocess.Popen([str(broker.find()), "-a", "127.0.0.1", "-p", str(port), "-l", str(tmp_path / "log")])
        try:
            deadline = time.monotonic() + 15
            while get(address + "/ready")[0] != 200:
                assert time.monotonic() < deadline, "the router does not find the broker that came late"
                time.sleep(0.05)
        finally:
            server.terminate()
            server.wait(10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


def test_the_router_never_imports_torch() -> None:
    code = "import sys, router.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
