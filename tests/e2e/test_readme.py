"""The commands of README.md as they stand there; only ports and 0.0.0.0 are changed, so that tests stay on loopback.

`make run` and `make test` are run by .ci/run.
"""

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import openai

from warmroute.up.broker import LogReader
from warmroute.up.stack import read_event

from .processes import Running, until

README = (Path(__file__).parents[2] / "README.md").read_text()
SHELL = [line for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S) for line in block.splitlines()]
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def free_ports(count: int) -> list[str]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


class Commands:
    """The README's commands, on ports that are free."""

    def __init__(self) -> None:
        self._ports = dict(zip(("4222", "8000", "8001"), free_ports(3), strict=True))

    def text(self, text: str) -> str:
        """With our ports, on loopback, and with the Python that runs the tests."""
        for given, free in self._ports.items():
            text = re.sub(rf"\b{given}\b", free, text)
        return text.replace("0.0.0.0", "127.0.0.1").replace(".venv/bin/", str(Path(sys.executable).parent) + "/")

    def words(self, *parts: str) -> list[str]:
        """The one command that has all `parts`."""
        (command,) = [line for line in SHELL if all(part in line for part in parts)]
        return shlex.split(self.text(command))


def test_print_config_shows_the_workers_settings() -> None:
    done = subprocess.run(Commands().words("worker --print-config"), capture_output=True, text=True, check=True)
    assert 'model = "smollm2"  # default' in done.stdout


async def test_the_processes_of_several_machines_answer_the_readmes_questions(tmp_path: Path) -> None:
    commands = Commands()
    with contextlib.ExitStack() as stack:

        def start(name: str, *parts: str, parse: Any = read_event) -> Running:
            process = Running(commands.words(*parts), tmp_path / f"{name}.log", parse=parse)
            stack.callback(process.stop)
            return process

        start("broker", "nats-server", parse=LogReader()).wait_ready()
        processes = [start("worker", "warmroute worker --id"), start("router", "warmroute router")]
        addresses = [process.wait_ready() for process in processes]
        async with aiohttp.ClientSession(addresses[1]) as client:

            async def ready() -> bool:
                async with client.get("/ready") as response:
                    return response.status == 200

            await until(ready)
        answer = curl(commands, "/v1/chat/completions")
        assert "x-warmroute-worker: worker-a" in answer.lower()
        route: Mapping[str, Any] = json.loads(curl(commands, "/v1/route"))
        assert route["worker"] == "worker-a"
        assert route["candidates"][0]["overlap_blocks"] >= 1
        (program,) = PYTHON
        assert f"import {openai.OpenAI.__name__}" in program
        printed = run([sys.executable, "-c", commands.text(program)])
        assert re.search(r"[A-Za-z]{3,}.* \d+\n", printed, re.S)


def curl(commands: Commands, path: str) -> str:
    """What the README's curl command for a path prints."""
    return run(commands.words("curl", path))


def run(words: list[str]) -> str:
    """What a command prints; a failure fails the test."""
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
