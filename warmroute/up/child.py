"""One child process: its start, the events that it prints, its log, its end."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 1 << 20
_TAIL_BYTES = 16_384

Event = Mapping[str, Any]
"""What a child says of itself; `{"event": "ready", "address": ...}` is the one that every child sends."""

Parse = Callable[[str], Event | None]
"""Reads one line of a child's standard output; None = an ordinary line, kept in the log."""


class Child:
    """A process in a group of its own, so that a terminal's Ctrl-C reaches only the parent, which ends the
    children in order.  On Linux the kernel kills it when the parent dies, however that happens.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self.ready: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        """Resolved by the first "ready" event."""
        self._process = process
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        parse: Parse,
        on_event: Callable[[str, Event], None],
        on_end: Callable[["Child", int], None],
        environ: Mapping[str, str] | None = None,
        merge_stderr: bool = False,
    ) -> "Child":
        """Start `command`; call from the main thread, since the kernel ties the child's life to that thread.

        Standard output is read line by line with `parse`; standard error goes to `log`, or with `merge_stderr`
        the same way as standard output.  `on_end` gets the exit status, or minus the number of the signal.
        """
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT if merge_stderr else file,
                env=None if environ is None else dict(environ),
                process_group=0,
                preexec_fn=_tied_to_parent(),
                limit=_LONGEST_LINE,
            )
        child = cls(name, process, log)
        child._reader = asyncio.create_task(child._follow(parse, on_event, on_end))
        return child

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.returncode is None

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when the process is gone and its output is read."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    def kill(self) -> None:
        """SIGKILL to the whole group of the child, at once."""
        self._signal(signal.SIGKILL)

    def tail(self, lines: int = 15) -> list[str]:
        """The last lines of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
                os.killpg(self._process.pid, number)

    async def _follow(
        self, parse: Parse, on_event: Callable[[str, Event], None], on_end: Callable[["Child", int], None]
    ) -> None:
        await self._read(parse, on_event)
        on_end(self, await self._process.wait())

    async def _read(self, parse: Parse, on_event: Callable[[str, Event], None]) -> None:
        assert self._process.stdout is not None
        with self.log.open("ab") as file:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:  # longer than the limit: no event of ours; what was buffered is dropped
                    continue
                if not line:
                    break
                event = parse(line.decode(errors="replace"))
                if event is None:
                    file.write(line)
                    file.flush()
                    continue
                if event.get("event") == "ready" and not self.ready.done():
                    self.ready.set_result(event)
                on_event(self.name, event)


def _tied_to_parent() -> Callable[[], None] | None:
    """What a child runs before its program starts: ask the kernel for SIGKILL when the parent's thread ends."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: the child may only do what is safe after a fork
    parent = os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return tie
