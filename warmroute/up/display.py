"""What `warmroute up` shows: progress and addresses on standard error, the proof's table and the curl line."""

import json
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from warmroute.proof import Proof
from warmroute.up.child import Event

if TYPE_CHECKING:
    from rich.status import Status


_FILE_WIDTH = 140


class Display:
    """On a terminal one moving line tells what is being waited for; elsewhere only lines that stay."""

    def __init__(self, *, results_on_stderr: bool) -> None:
        self._progress = _console(stderr=True)
        self._results = self._progress if results_on_stderr else _console(stderr=False)
        self._status: Status | None = None
        self._doing: dict[str, str] = {}
        self._started: dict[str, float] = {}

    def __enter__(self) -> "Display":
        if self._progress.is_terminal:
            self._status = self._progress.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.calm()

    def calm(self) -> None:
        """End the moving line: nothing is being waited for any more."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def event(self, name: str, event: Event) -> None:
        """A child said something of itself."""
        what = event["event"]
        if what == "started":
            self._started[name] = time.monotonic()
            self._doing[name] = "starting"
        elif what == "progress":
            self._step(name, str(event.get("what", "")), event.get("fraction"))
        elif what == "ready":
            self._doing.pop(name, None)
            took = time.monotonic() - self._started.get(name, time.monotonic())
            self.line(f"{name:<10} {event['address']:<28} ready after {took:.1f} s")
        self._refresh()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._progress.print(Text(text))

    def waiting(self, text: str) -> None:
        """Say what is being waited for."""
        if self._status is not None:
            self._status.update(Text(text))
        else:
            self.line(text)

    def error(self, text: str, log: list[str]) -> None:
        """What went wrong, with the last lines of the log of the process that did."""
        self.calm()
        self._progress.print(Text(f"error: {text}", style="bold red"))
        for entry in log:
            self._progress.print(Text(f"  | {entry}", style="dim"))

    def proof(self, proof: Proof) -> None:
        """The table of the three turns and what it says."""
        table = Table(title="one conversation, three requests", title_justify="left")
        for heading in ("request", "worker", "overlap", "cached tokens", "first token"):
            table.add_column(heading, justify="left" if heading in ("request", "worker") else "right")
        table.add_column("why this worker", overflow="fold")
        for turn in (proof.first, proof.warm, proof.cold):
            table.add_row(
                turn.label,
                turn.worker,
                f"{turn.overlap_blocks} of {turn.prompt_blocks} blocks",
                f"{turn.cached_tokens} of {turn.prompt_tokens}",
                f"{turn.ttft_ms:.0f} ms",
                Text(turn.reason),
            )
        self._results.print(table)
        self._results.print(
            Text(
                f"The same follow-up, {proof.warm.prompt_tokens} tokens: {proof.cold.ttft_ms:.0f} ms to the first "
                f"token where nothing is cached, {proof.warm.ttft_ms:.0f} ms where the conversation is: "
                f"{proof.speedup:.1f} times sooner."
            )
        )
        self._results.print(Text(f"Answer: {proof.warm.text.strip()}"))

    def how_to_try(self, router: str, model: str) -> None:
        """A command line to copy."""
        question = [{"role": "user", "content": "What is a cache?"}]
        body = json.dumps({"model": model, "messages": question, "max_tokens": 60})
        command = f"curl -i {router}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
        self._results.print(Text(f"\ntry it:  {command}\nCtrl-C ends everything."), soft_wrap=True)

    def _step(self, name: str, what: str, fraction: object) -> None:
        before = self._doing.get(name, "")
        percent = f" {fraction:.0%}" if isinstance(fraction, (int, float)) else ""
        self._doing[name] = what + percent
        if self._status is None and not before.startswith(what):
            self.line(f"{name:<10} {what}")

    def _refresh(self) -> None:
        if self._status is not None and self._doing:
            self._status.update(Text(", ".join(f"{name}: {doing}" for name, doing in self._doing.items())))


def _console(*, stderr: bool) -> Console:
    """A terminal has its own width; a file or a pipe gets lines that a table fits in."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
