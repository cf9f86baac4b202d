"""What this router has promised to each source, and how that joins what sources say of themselves.

A reservation is made when a prompt is placed; its prefill part ends with the first byte of the answer, its
decode part with the last. A source's own figures (heartbeats) contain our promises too, so they are joined
by difference, never by sum.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

RECENT_S = 300.0
"""Time in which recent prefill work fades to 1/e: about what a cache keeps, long against one prompt."""
_SEEN_AFTER_S = 0.5
"""A promise older than this is surely part of a heartbeat that arrives now."""


class SourceKey(NamedTuple):
    """An incarnation of a source; another epoch has its own account, so that late releases never touch it."""

    worker: str
    dp_rank: int
    epoch: int


class Account:
    """Work promised by this router to one incarnation of a source; all figures are >= 0."""

    __slots__ = (
        "_computed",
        "_decoding",
        "_elsewhere_blocks",
        "_elsewhere_running",
        "_elsewhere_tokens",
        "_recent",
        "_recent_at",
        "_waiting",
        "decode_blocks",
        "prefill_tokens",
        "requests",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0
        self.prefill_tokens = 0
        self.decode_blocks = 0
        self._waiting: dict[int, tuple[float, int]] = {}
        self._decoding = 0
        self._computed = 0
        self._elsewhere_tokens = 0
        self._elsewhere_blocks = 0
        self._elsewhere_running = 0
        self._recent = 0.0
        self._recent_at = 0.0

    @property
    def queued_tokens(self) -> int:
        """Prefill not yet done: ours, less what a heartbeat showed as computed, plus what others sent
        there.
        """
        return max(0, self.prefill_tokens - self._computed) + self._elsewhere_tokens

    @property
    def pinned_blocks(self) -> int:
        """Distinct blocks held by requests in flight, ours and others'; prompts that share a prefix share
        its blocks.
        """
        return self.decode_blocks + self._elsewhere_blocks

    @property
    def decoding_blocks(self) -> int:
        """Context that decode steps read: all blocks of each request that has begun to answer."""
        return self._decoding + self._elsewhere_blocks

    @property
    def running(self) -> int:
        """Requests in flight, ours and others'."""
        return self.requests + self._elsewhere_running

    def recent_tokens(self, now: float) -> float:
        """Prefill tokens given to the source, each fading with `RECENT_S`."""
        return self._recent * math.exp(-max(0.0, now - self._recent_at) / RECENT_S)

    def heard(self, *, prefill_tokens: int, decode_blocks: int, running: int, now: float) -> None:
        """Take a heartbeat's figures: what exceeds our own promises is others' work; what is less, progress
        on our older ones.
        """
        surely_seen = sum(tokens for at, tokens in self._waiting.values() if now - at > _SEEN_AFTER_S)
        self._computed = max(0, surely_seen - prefill_tokens)
        self._elsewhere_tokens = max(0, prefill_tokens - self.prefill_tokens)
        self._elsewhere_blocks = max(0, decode_blocks - self.decode_blocks)
        self._elsewhere_running = max(0, running - self.requests)

    def _add(self, ticket: int, prefill_tokens: int, decode_blocks: int, now: float) -> None:
        self.requests += 1
        self.prefill_tokens += prefill_tokens
        self.decode_blocks += decode_blocks
        self._waiting[ticket] = (now, prefill_tokens)
        self._recent = self.recent_tokens(now) + prefill_tokens
        self._recent_at = now

    def _prefill_done(self, ticket: int, context_blocks: int) -> None:
        if ticket in self._waiting:
            tokens = self._waiting.pop(ticket)[1]
            self.prefill_tokens -= tokens
            self._computed = max(0, self._computed - tokens)
            self._decoding += context_blocks

    def _done(self, decode_blocks: int, context_blocks: int) -> None:
        self.requests -= 1
        self.decode_blocks -= decode_blocks
        self._decoding -= context_blocks


class Reservation:
    """One request's promise on one account.

    Every method may be called again, and in any order after `end`, without effect.
    """

    __slots__ = ("_account", "_blocks", "_context", "_ended", "_ticket")

    def __init__(self, account: Account, ticket: int, decode_blocks: int, context_blocks: int) -> None:
        self._account, self._ticket = account, ticket
        self._blocks, self._context = decode_blocks, context_blocks
        self._ended = False

    def first_byte(self) -> None:
        """The prefill is done."""
        self._account._prefill_done(self._ticket, self._context)

    def end(self) -> None:
        """The request is over, in whatever way."""
        if not self._ended:
            self._ended = True
            self._account._prefill_done(self._ticket, self._context)
            self._account._done(self._blocks, self._context)


class LoadLedger:
    """The accounts of all sources.  One owner: the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[SourceKey, Account] = {}
        self._tickets = 0

    def account(self, key: SourceKey) -> Account:
        """A source's account, opened on first use; a source that leaves and returns with the same epoch
        keeps it.
        """
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account()
        return account

    def reserve(
        self, key: SourceKey, *, prefill_tokens: int, decode_blocks: int, context_blocks: int = 0
    ) -> Reservation:
        """Promise work to a source: tokens to prefill, blocks that come to be held, blocks of the whole
        context.

        Negative figures count as 0.
        """
        self._tickets += 1
        account = self.account(key)
        blocks = max(0, decode_blocks)
        account._add(self._tickets, max(0, prefill_tokens), blocks, self._clock())
        return Reservation(account, self._tickets, blocks, max(0, context_blocks))

    def prune(self, known: set[SourceKey]) -> None:
        """Close the accounts of sources that are not known any more and owe nothing; the others stay until
        they are settled.
        """
        for key in [k for k, a in self._accounts.items() if k not in known and not a.requests]:
            del self._accounts[key]

    def totals(self) -> tuple[int, int, int]:
        """(requests, prefill tokens, decode blocks) promised over all accounts."""
        accounts = self._accounts.values()
        return (
            sum(a.requests for a in accounts),
            sum(a.prefill_tokens for a in accounts),
            sum(a.decode_blocks for a in accounts),
        )

    @property
    def size(self) -> int:
        """Accounts kept."""
        return len(self._accounts)
