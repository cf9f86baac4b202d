"""Starts one worker process: model, engine, HTTP, event plane; runs until a signal, then drains."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from serving import logs
from serving.http import start_server
from worker.config import WorkerConfig
from worker.engine import Engine, EngineCore
from worker.event_plane import event_plane, new_publisher, reachable_host
from worker.http.app import build
from worker.loading import Loaded, load, warm_up
from worker.service import Worker

log = logging.getLogger(__name__)

_EXIT_FAILED = 1
_SHUTDOWN_S = 2.0


@dataclass(slots=True, frozen=True)
class Running:
    """A worker that listens and, with a bus, is known to routers."""

    worker: Worker
    address: str


@asynccontextmanager
async def running(config: WorkerConfig, loaded: Loaded) -> AsyncIterator[Running]:
    """A worker from start to end, in the caller's event loop; leaving the block drains it first."""
    async with AsyncExitStack() as stack:
        publisher = new_publisher(config.worker_id, config.dp_rank, loaded.name, loaded.context.block_size_tokens)
        loaded.context.dynamo_helper.add_kv_event_listener(publisher.listener)
        stack.callback(loaded.context.dynamo_helper.remove_kv_event_listener, publisher.listener)
        core = EngineCore(loaded.model, loaded.context, loaded.tokenizer, on_step_end=publisher.end_step)
        engine = Engine(core, asyncio.get_running_loop(), max_waiting=config.max_waiting, debug=config.debug)
        worker = Worker(config, loaded.name, loaded.tokenizer, engine, loaded.model.config.vocab)
        engine.start()
        stack.push_async_callback(_stop_engine, engine)
        runner, port = await start_server(build(worker), config.host, config.port, shutdown_timeout_s=_SHUTDOWN_S)
        stack.push_async_callback(runner.cleanup)
        address = config.advertised_address or f"http://{reachable_host(config.host, config.nats)}:{port}"
        plane = None
        if config.nats:
            plane = await stack.enter_async_context(event_plane(worker, publisher, address))
        try:
            yield Running(worker, address)
        finally:
            worker.state = "draining"
            if plane is not None:
                plane.beat_now()
            if not await worker.wait_idle(config.drain_timeout_s):
                log.warning("worker.drain_timeout", extra={"requests": worker.under_way})


def run(config: WorkerConfig) -> int:
    """Run until SIGINT or SIGTERM; prints JSON lines of progress, and one when ready, on standard output.

    Returns the exit status.  A second signal ends the process without waiting for running requests.
    """
    logs.setup(config.log_level, json=config.log_json)
    try:
        loaded = load(config, lambda what, fraction: _tell("progress", config, what=what, fraction=round(fraction, 3)))
        _tell("progress", config, what="warming up", fraction=0.95)
        seconds = warm_up(loaded)
    except (ValueError, NotImplementedError, OSError) as error:
        log.error("worker.start_failed", extra={"reason": str(error)})
        return _EXIT_FAILED
    log.info(
        "worker.loaded",
        extra={
            "model": loaded.name,
            "blocks": loaded.context.kv_block_allocator.total_count - 1,
            "block_size": loaded.context.block_size_tokens,
            "warm_up_ms": round(seconds * 1000),
        },
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, loaded))


async def _serve(config: WorkerConfig, loaded: Loaded) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def signalled() -> None:
        if stop.is_set():
            main.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    try:
        async with running(config, loaded) as started:
            _tell("ready", config, address=started.address)
            await stop.wait()
            log.info("worker.draining", extra={"requests": started.worker.under_way})
    except asyncio.CancelledError:
        log.warning("worker.interrupted")
        return _EXIT_FAILED
    except OSError as error:
        log.error("worker.start_failed", extra={"reason": str(error)})
        return _EXIT_FAILED
    return 0


async def _stop_engine(engine: Engine) -> None:
    if not await asyncio.to_thread(engine.stop):
        log.error("worker.engine_did_not_stop")


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _tell(event: str, config: WorkerConfig, **facts: Any) -> None:
    """One line for whoever started the process."""
    line = {"event": event, "component": "worker", "id": config.worker_id, **facts}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
