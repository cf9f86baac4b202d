"""Tells listeners which blocks were stored, removed or cleared, in true order and each once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

KVEventListener = Callable[[str, dict[str, Any]], None]
"""`listener(kind, payload)`; kind is "stored", "removed" or "cleared"."""


@dataclass(slots=True)
class _PendingStore:
    """A run of blocks that waits for its forward: parent first, each the parent of the next."""

    parent_hash: int | None
    hashes: list[int]
    token_ids: list[int]
    block_size: int


class DynamoHelper:
    """One ordered stream of KV-cache events per context.

    A stored event waits until the forward that writes its blocks has succeeded.  What goes before it was published is
    never announced; what is announced already is not announced again; removals name children before parents.
    """

    def __init__(self) -> None:
        self._listeners: list[KVEventListener] = []
        self._pending: list[_PendingStore] = []
        self._pending_hashes: set[int] = set()
        self._depths: dict[int, int] = {}
        """Announced hash -> its depth in its chain (0 for a root); the keys are the announced set."""
        self._on_published: list[Callable[[], None]] = []
        self._on_discarded: list[Callable[[], None]] = []
        self.listener_failures = 0
        """Times a listener raised."""

    @property
    def has_kv_event_listeners(self) -> bool:
        """Whether any listener is registered."""
        return bool(self._listeners)

    @property
    def has_pending(self) -> bool:
        """Whether stored events wait for the forward."""
        return bool(self._pending)

    @property
    def announced_hashes(self) -> frozenset[int]:
        """The hashes that listeners have been told of and that were not removed since."""
        return frozenset(self._depths)

    def add_kv_event_listener(self, listener: KVEventListener) -> None:
        """Call `listener(kind, payload)` on the engine's thread for every event from now on."""
        self._listeners.append(listener)

    def remove_kv_event_listener(self, listener: KVEventListener) -> None:
        """Stop calling a listener.

        Raises:
            ValueError: it is not registered.
        """
        try:
            self._listeners.remove(listener)
        except ValueError:
            raise ValueError(f"KV-event listener {listener!r} is not registered") from None

    def add_step_hooks(self, on_published: Callable[[], None], on_discarded: Callable[[], None]) -> None:
        """Tell the owner of the blocks when a step's forward has succeeded and when it was given up."""
        self._on_published.append(on_published)
        self._on_discarded.append(on_discarded)

    def queue_kv_stored_event(self, payload: dict[str, Any]) -> None:
        """Queue a stored event until the forward has succeeded.

        Args:
            payload: {"block_hashes": [int], "token_ids": [int, flat], "num_block_tokens": [int, ...],
                "parent_hash": int or None}; blocks in order, each the parent of the next.
        """
        hashes, tokens = payload["block_hashes"], payload["token_ids"]
        block_size = len(tokens) // len(hashes) if hashes else 0
        parent = payload["parent_hash"] or None
        run: _PendingStore | None = None
        for i, block_hash in enumerate(hashes):
            if block_hash in self._depths or block_hash in self._pending_hashes:
                run = None
            else:
                if run is None:
                    run = _PendingStore(parent, [], [], block_size)
                    self._pending.append(run)
                run.hashes.append(block_hash)
                run.token_ids.extend(tokens[i * block_size : (i + 1) * block_size])
                self._pending_hashes.add(block_hash)
            parent = block_hash

    def publish_pending_kv_stored_events(self) -> None:
        """Publish the blocks that the step's forward has just written."""
        for hook in self._on_published:
            hook()
        pending, self._pending = self._pending, []
        self._pending_hashes.clear()
        for store in pending:
            depth = self._depths.get(store.parent_hash, -1) if store.parent_hash is not None else -1
            for offset, block_hash in enumerate(store.hashes, start=1):
                self._depths[block_hash] = depth + offset
            self._emit_kv_event(
                "stored",
                {
                    "block_hashes": store.hashes,
                    "token_ids": store.token_ids,
                    "num_block_tokens": [store.block_size] * len(store.hashes),
                    "parent_hash": store.parent_hash,
                },
            )

    def discard_pending_kv_stored_events(self) -> None:
        """Forget what a failed or interrupted forward would have stored; its blocks are un-registered as well."""
        for hook in self._on_discarded:
            hook()
        self._pending.clear()
        self._pending_hashes.clear()

    def on_kv_blocks_deregistered(self, _block_ids: list[int], hashes: Iterable[int]) -> None:
        """Announce removals: children before parents, ties by hash; unannounced blocks are dropped from the queue."""
        unannounced = [block_hash for block_hash in hashes if block_hash in self._pending_hashes]
        if unannounced:
            self._cancel(set(unannounced))
        announced = [block_hash for block_hash in hashes if block_hash in self._depths]
        if not announced:
            return
        announced.sort(key=lambda block_hash: (-self._depths[block_hash], block_hash))
        for block_hash in announced:
            del self._depths[block_hash]
        self._emit_kv_event("removed", {"block_hashes": announced})

    def notify_kv_cache_cleared(self) -> None:
        """Announce that no block advertised before is held any more."""
        self._pending.clear()
        self._pending_hashes.clear()
        self._depths.clear()
        self._emit_kv_event("cleared", {})

    def _cancel(self, cancelled: set[int]) -> None:
        """Take blocks out of the queue; what stands behind one becomes a run of its own under its true parent."""
        pending, self._pending = self._pending, []
        self._pending_hashes -= cancelled
        for store in pending:
            parent = store.parent_hash
            run: _PendingStore | None = None
            for i, block_hash in enumerate(store.hashes):
                if block_hash in cancelled:
                    run = None
                else:
                    if run is None:
                        run = _PendingStore(parent, [], [], store.block_size)
                        self._pending.append(run)
                    run.hashes.append(block_hash)
                    run.token_ids.extend(store.token_ids[i * store.block_size : (i + 1) * store.block_size])
                parent = block_hash

    def _emit_kv_event(self, kind: str, payload: dict[str, Any]) -> None:
        """Call every listener; one that raises is counted and logged, and stops neither the others nor inference."""
        for listener in list(self._listeners):
            try:
                listener(kind, payload)
            except Exception:
                self.listener_failures += 1
                logger.exception("KV-event listener failed on %r", kind)
