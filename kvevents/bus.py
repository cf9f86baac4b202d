"""The bus as the event plane needs it, and its NATS form: nothing here ever waits for an outage to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

logger = logging.getLogger(__name__)

_RECONNECT_S = (0.1, 1.0)
_PING_S = 5
_PENDING_BYTES = 8 * 1024 * 1024
"""What may wait in the client for the socket."""
_BACKPRESSURE_S = 0.2


class Incoming(NamedTuple):
    """A message from the bus; `reply` is the subject to answer on, "" if none is expected."""

    subject: str
    data: bytes
    reply: str


Handler = Callable[[Incoming], None]
"""Called on the event loop, in order of arrival; must not block and must not raise."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """Stop hearing; calling it again changes nothing."""
        ...


class Bus(Protocol):
    """At-most-once messages by subject, and requests; per publisher and subscriber, order is kept."""

    @property
    def connected(self) -> bool: ...

    @property
    def max_payload(self) -> int:
        """Bytes that one message may hold."""
        ...

    async def publish(self, subject: str, data: bytes) -> bool:
        """Send, or return False if it can't be sent now or exceeds `max_payload`.

        Waits at most a moment for a burst to leave, and never for an outage.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscription: ...

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Ask and wait for one answer.

        Raises:
            TimeoutError: nobody answered in time, or the bus is away.
        """
        ...

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call back after every reconnect: messages may have been lost."""
        ...

    async def close(self) -> None: ...


class _NatsSubscription:
    def __init__(self, bus: NatsBus, subject: str, handler: Handler) -> None:
        self.subject, self.handler = subject, handler
        self._bus = bus
        self.live: Any = None

    async def unsubscribe(self) -> None:
        self._bus._subscriptions.discard(self)
        live, self.live = self.live, None
        if live is not None and self._bus.connected:
            await live.unsubscribe()


class NatsBus:
    """A NATS connection that comes up in the background, reconnects for ever, and refuses instead of waiting."""

    def __init__(self, client: Client, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self._subscriptions: set[_NatsSubscription] = set()
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False
        self._congested = False
        self.reconnects = 0
        self.refused = 0
        """Messages that could not be sent because the connection was away or full."""
        self.handler_failures = 0
        self.errors = 0

    @classmethod
    async def connect(cls, url: str, *, name: str = "warmroute", wait_s: float = 5.0, **options: Any) -> NatsBus:
        """Connect; after `wait_s` without a server, return all the same and go on trying in the background.

        Args:
            url: nats://host:port, or several separated by commas.
            options: passed to the NATS client (user, password, nkeys_seed, tls ...).
        """
        bus = cls(Client(), {"servers": url.split(","), "name": name, **options})
        bus._connecting = asyncio.create_task(bus._connect())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(bus._connecting), wait_s)
        return bus

    async def _connect(self) -> None:
        while not self._closed:
            try:
                await self._client.connect(
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=random.uniform(*_RECONNECT_S),  # type: ignore[arg-type]  # seconds, fractions too
                    ping_interval=_PING_S,
                    max_outstanding_pings=2,
                    pending_size=2 * _PENDING_BYTES,
                    reconnected_cb=self._reconnected,
                    error_cb=self._errored,
                    disconnected_cb=self._disconnected,
                    **self._options,
                )
            except (TimeoutError, OSError, nats.errors.Error) as error:
                self.errors += 1
                logger.debug("bus.connect_failed: %r", error)
                await asyncio.sleep(random.uniform(*_RECONNECT_S))
                continue
            for subscription in list(self._subscriptions):
                await self._go_live(subscription)
            return

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload or 1024 * 1024)

    async def publish(self, subject: str, data: bytes) -> bool:
        if not self.connected or not await self._has_room():
            self.refused += 1
            return False
        try:
            await self._client.publish(subject, data)
        except nats.errors.Error as error:
            self.refused += 1
            logger.warning("bus.publish_failed: %s: %r", subject, error)
            return False
        return True

    async def _has_room(self) -> bool:
        """Let a burst leave; a socket that takes nothing for a while is congested and makes nobody wait again."""
        deadline = 0.0 if self._congested else time.monotonic() + _BACKPRESSURE_S
        while self._client.pending_data_size > _PENDING_BYTES:
            if not self.connected or time.monotonic() >= deadline:
                self._congested = True
                return False
            await asyncio.sleep(0.001)
        self._congested = False
        return True

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        subscription = _NatsSubscription(self, subject, handler)
        self._subscriptions.add(subscription)
        if self.connected:
            await self._go_live(subscription)
        return subscription

    async def _go_live(self, subscription: _NatsSubscription) -> None:
        if subscription.live is not None:
            return

        async def deliver(message: Msg) -> None:
            try:
                subscription.handler(Incoming(message.subject, message.data, message.reply))
            except Exception:
                self.handler_failures += 1
                logger.exception("bus.handler_failed: %s", message.subject)

        subscription.live = await self._client.subscribe(subscription.subject, cb=deliver)
        # Once the server has seen it, whatever is published from now on arrives.
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
            await self._client.flush(timeout=2)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        if not self.connected:
            raise TimeoutError(f"no answer on {subject}: the bus is not connected")
        try:
            reply = await self._client.request(subject, data, timeout=timeout_s)
        except (TimeoutError, nats.errors.Error) as error:
            raise TimeoutError(f"no answer on {subject} within {timeout_s} s: {error!r}") from None
        return reply.data

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._reconnect_callbacks.append(callback)

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._client.is_connected:
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
                await self._client.flush(timeout=1)
        await self._client.close()

    async def _reconnected(self) -> None:
        self.reconnects += 1
        logger.info("bus.reconnected")
        for callback in self._reconnect_callbacks:
            callback()

    async def _disconnected(self) -> None:
        if not self._closed:
            logger.warning("bus.disconnected")

    async def _errored(self, error: Exception) -> None:
        self.errors += 1
        logger.debug("bus.error: %r", error)


class MemoryBus:
    """The same contract inside one process, for engines and tests that need no broker; delivery is in order."""

    def __init__(self, *, max_payload: int = 1024 * 1024) -> None:
        self._max_payload = max_payload
        self._handlers: list[tuple[list[str], Handler]] = []
        self._inbox = 0
        self.connected = True

    @property
    def max_payload(self) -> int:
        return self._max_payload

    async def publish(self, subject: str, data: bytes) -> bool:
        return self._deliver(Incoming(subject, data, ""))

    def _deliver(self, incoming: Incoming) -> bool:
        if len(incoming.data) > self._max_payload:
            return False
        tokens = incoming.subject.split(".")
        for pattern, handler in list(self._handlers):
            if _matches(pattern, tokens):
                handler(incoming)
        return True

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        entry = (subject.split("."), handler)
        self._handlers.append(entry)
        return _MemorySubscription(self._handlers, entry)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        self._inbox += 1
        inbox, answer = f"_INBOX.{self._inbox}", asyncio.get_running_loop().create_future()
        subscription = await self.subscribe(
            inbox, lambda incoming: None if answer.done() else answer.set_result(incoming.data)
        )
        try:
            self._deliver(Incoming(subject, data, inbox))
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            await subscription.unsubscribe()

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Never called: this bus does not disconnect."""

    async def close(self) -> None:
        self._handlers.clear()


class _MemorySubscription:
    def __init__(self, handlers: list[tuple[list[str], Handler]], entry: tuple[list[str], Handler]) -> None:
        self._handlers, self._entry = handlers, entry

    async def unsubscribe(self) -> None:
        if self._entry in self._handlers:
            self._handlers.remove(self._entry)


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    for i, part in enumerate(pattern):
        if part == ">":
            return len(tokens) > i
        if i >= len(tokens) or (part != "*" and part != tokens[i]):
            return False
    return len(pattern) == len(tokens)
