"""The course of `warmroute up`: start, wait until the router sees every worker, prove, serve, end."""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import aiohttp

from warmroute.cli import EXIT_DEPENDENCY, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from warmroute.proof import ProofError, prove
from warmroute.up.broker import BrokerMissing
from warmroute.up.display import Display
from warmroute.up.stack import Stack, StackError
from warmroute.up_config import UpConfig

_POLL_S = 0.05


def run(config: UpConfig) -> int:
    """Run a whole stack until a signal, or until the proof with `once`; returns the exit status.

    The processes' logs lie in a temporary folder, which is removed at the end unless a process failed.
    """
    folder = Path(config.keep_logs or tempfile.mkdtemp(prefix="warmroute-"))
    folder.mkdir(parents=True, exist_ok=True)
    keep = bool(config.keep_logs)
    try:
        with Display(results_on_stderr=config.json) as display:
            try:
                return asyncio.run(_run(config, folder, display))
            except BrokerMissing as error:
                display.error(str(error), [])
                return EXIT_DEPENDENCY
            except StackError as error:
                keep = True
                display.error(str(error), error.child.tail())
                display.line(f"all logs: {folder}")
                return EXIT_FAILED
    finally:
        if not keep:
            shutil.rmtree(folder)


async def _run(config: UpConfig, folder: Path, display: Display) -> int:
    stack = Stack(config, folder, display.event)
    course = _Course(config, stack, display)
    task = asyncio.create_task(course.run())

    def interrupt() -> None:
        if task.done() or task.cancelling():
            stack.kill()  # asked twice: do not wait for a clean end
        display.calm()
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        return EXIT_OK if course.serving else EXIT_INTERRUPTED
    finally:
        await stack.stop()


class _Course:
    """What happens between start and end."""

    def __init__(self, config: UpConfig, stack: Stack, display: Display) -> None:
        self.serving = False
        """Whether everything is up and proved, so that an interruption is the normal end."""
        self._config = config
        self._stack = stack
        self._display = display

    async def run(self) -> int:
        """Go through it; the result is the exit status.  Raises `StackError` when a process ends by itself."""
        config, display, stack = self._config, self._display, self._stack
        router = await stack.start()
        model = await stack.guard(self._all_seen(router))
        if config.once or (config.proof and config.workers > 1):
            failed = await stack.guard(self._prove(router))
            if config.once:
                return EXIT_FAILED if failed else EXIT_OK
        display.calm()
        display.how_to_try(router, model)
        self.serving = True
        await stack.guard(asyncio.Event().wait())
        raise AssertionError("only a signal or the end of a process ends serving")

    async def _all_seen(self, router: str) -> str:
        """Wait until the router sends prompts to every worker; returns their model's name."""
        self._display.waiting("waiting until the router sees every worker")
        async with aiohttp.ClientSession(router, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while True:
                async with session.get("/v1/workers") as response:
                    rows = (await response.json())["workers"]
                models = [str(row["model"]) for row in rows if row["takes_prompts"]]
                if len(models) >= self._config.workers:
                    return models[0]
                await asyncio.sleep(_POLL_S)

    async def _prove(self, router: str) -> bool:
        """Show the proof; returns whether it failed."""
        display = self._display
        try:
            proof = await prove(router, display.waiting)
        except ProofError as error:
            display.error(f"the proof failed: {error}", [])
            self._print_json({"error": str(error)})
            return True
        display.calm()
        display.proof(proof)
        failures = proof.failures()
        for failure in failures:
            display.error(f"the proof does not hold: {failure}", [])
        self._print_json(proof.as_dict() | ({"error": "; ".join(failures)} if failures else {}))
        return bool(failures)

    def _print_json(self, figures: dict[str, object]) -> None:
        if self._config.json:
            sys.stdout.write(json.dumps(figures, ensure_ascii=False) + "\n")
            sys.stdout.flush()
