"""One attempt to bring a source into step: the messages it missed, or the whole set."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvevents import control
from kvevents.block_set import BlockSet
from kvevents.bus import Bus
from kvevents.messages import Message, RejectedMessage, decode_message, unpack_hashes
from kvevents.source import TIERS, Source
from kvevents.subjects import control_subject
from kvevents.types import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_REPLY_S = 2.0
_MAX_PAGES = 64
_MAX_CHUNKS = 65536


class _Failed(Exception):
    """This attempt did not work; the text is a short label for counting."""


async def attempt(bus: Bus, source: Source, clock: Callable[[], float]) -> str | None:
    """Ask the source's worker for what is missing and apply it; return None, or why it failed."""
    try:
        if source.wants_snapshot or not await _by_events(bus, source, clock):
            await _by_snapshot(bus, source, clock)
    except _Failed as failure:
        return str(failure)
    except TimeoutError:
        return "timeout"
    except (RejectedMessage, ValueError) as error:
        logger.warning("repair.rejected: %s/%d: %s", source.id.worker, source.id.dp_rank, error)
        return "malformed_reply"
    except Exception:
        # A repair that fails in a way we did not foresee is tried again, and told.
        logger.exception("repair.failed: %s/%d", source.id.worker, source.id.dp_rank)
        return "internal_error"
    return None


async def _ask(bus: Bus, source: Source, request: control.Request) -> control.Reply:
    reply = await bus.request(control_subject(source.id), control.encode(request), _REPLY_S)
    return control.decode_reply(reply)


async def _by_events(bus: Bus, source: Source, clock: Callable[[], float]) -> bool:
    """Apply missed messages; False if the worker no longer has them."""
    epoch, seq = source.epoch, source.seq
    messages: list[Message] = []
    for _ in range(_MAX_PAGES):
        reply = await _ask(bus, source, control.EventsSince(PROTOCOL_VERSION, epoch, seq))
        if isinstance(reply, control.TooOld):
            return False
        if not isinstance(reply, control.Events):
            raise _Failed("unexpected_reply")
        page = [decode_message(data) for data in reply.messages]
        if any(message.epoch != epoch or message.seq != seq + i for i, message in enumerate(page, start=1)):
            raise _Failed("events_out_of_order")
        messages += page
        seq += len(page)
        if not reply.more or not page:
            return source.repaired_by_events(messages, clock())
    return False


async def _by_snapshot(bus: Bus, source: Source, clock: Callable[[], float]) -> None:
    """Fetch the whole set part by part, check its digest, and swap it in."""
    view = BlockSet()
    first: control.SnapshotPart | None = None
    chunk = 0
    while first is None or chunk < first.chunks:
        name = first.snapshot if first is not None else ""
        part = await _ask(bus, source, control.SnapshotChunk(PROTOCOL_VERSION, name, chunk))
        if isinstance(part, control.Refused):
            raise _Failed(f"refused_{part.reason}")
        if not isinstance(part, control.SnapshotPart) or part.chunk != chunk:
            raise _Failed("unexpected_reply")
        first = first or part
        if (part.epoch, part.seq, part.snapshot) != (first.epoch, first.seq, first.snapshot):
            raise _Failed("mixed_snapshot")
        if part.chunks != first.chunks or not 1 <= part.chunks <= _MAX_CHUNKS:
            raise _Failed("malformed_reply")
        if len(part.engine_hashes) != len(part.sequence_hashes) or not 0 <= part.tier < TIERS:
            raise _Failed("malformed_reply")
        if not 1 <= part.epoch < 2**64 or part.seq < 0:
            raise _Failed("malformed_reply")
        view.store(unpack_hashes(part.engine_hashes), unpack_hashes(part.sequence_hashes), part.tier)
        chunk += 1
    if len(view) != first.blocks or view.digest != first.digest:
        raise _Failed("snapshot_digest")
    if not source.repaired_by_snapshot(view, first.epoch, first.seq, clock()):
        raise _Failed("late_snapshot")
