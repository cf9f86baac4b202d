"""Promised load: it returns to zero after every path, belongs to one incarnation, and joins heartbeats
without double counting.
"""

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.load import RECENT_S, Account, LoadLedger, Reservation, SourceKey

EXAMPLES = int(os.environ.get("WARMROUTE_PROPERTY_EXAMPLES", "60"))


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LedgerPaths(RuleBasedStateMachine):
    """Requests live through reserve, first byte, end and cancel in any order and number; sources come and
    go meanwhile.
    """

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.ledger = LoadLedger(self.clock)
        self.open: list[tuple[Reservation, int, int, bool]] = []
        self.ended: list[Reservation] = []

    @rule(
        worker=st.sampled_from("abc"),
        epoch=st.integers(1, 3),
        tokens=st.integers(-5, 5000),
        blocks=st.integers(-5, 300),
    )
    def reserve(self, worker: str, epoch: int, tokens: int, blocks: int) -> None:
        key = SourceKey(worker, 0, epoch)
        made = self.ledger.reserve(key, prefill_tokens=tokens, decode_blocks=blocks, context_blocks=2 * blocks)
        self.open.append((made, max(0, tokens), max(0, blocks), False))

    @rule(data=st.data())
    def first_byte(self, data: st.DataObject) -> None:
        if self.open:
            at = data.draw(st.integers(0, len(self.open) - 1))
            made, tokens, blocks, _ = self.open[at]
            made.first_byte()
            self.open[at] = (made, tokens, blocks, True)

    @rule(data=st.data(), times=st.integers(1, 3))
    def end(self, data: st.DataObject, times: int) -> None:
        if self.open:
            made = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))[0]
            for _ in range(times):
                made.end()
            self.ended.append(made)

    @rule(data=st.data())
    def late_calls_change_nothing(self, data: st.DataObject) -> None:
        if self.ended:
            made = data.draw(st.sampled_from(self.ended))
            before = self.ledger.totals()
            made.first_byte()
            made.end()
            assert self.ledger.totals() == before

    @rule(worker=st.sampled_from("abc"), tokens=st.integers(0, 9000), seconds=st.floats(0, 5))
    def heartbeat(self, worker: str, tokens: int, seconds: float) -> None:
        self.clock.now += seconds
        account = self.ledger.account(SourceKey(worker, 0, 1))
        account.heard(prefill_tokens=tokens, decode_blocks=tokens // 16, running=1, now=self.clock.now)

    @rule(known=st.sets(st.sampled_from("abc")))
    def sources_leave(self, known: set[str]) -> None:
        self.ledger.prune({SourceKey(worker, 0, 1) for worker in known})

    @invariant()
    def books_balance(self) -> None:
        assert self.ledger.totals() == (
            len(self.open),
            sum(tokens for _, tokens, _, answered in self.open if not answered),
            sum(blocks for _, _, blocks, _ in self.open),
        )

    def teardown(self) -> None:
        for made, *_ in getattr(self, "open", []):
            made.end()
        if hasattr(self, "ledger"):
            assert self.ledger.totals() == (0, 0, 0)
            for key in [SourceKey(worker, 0, 2) for worker in "abc"]:
                assert self.ledger.account(key).decoding_blocks == 0
            self.ledger.prune(set())
            assert self.ledger.size == 0


LedgerPaths.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
TestLedgerPaths = LedgerPaths.TestCase


def test_a_late_release_of_an_old_incarnation_never_touches_the_new_one() -> None:
    ledger = LoadLedger(Clock())
    old = ledger.reserve(SourceKey("w", 0, 1), prefill_tokens=10, decode_blocks=2)
    ledger.reserve(SourceKey("w", 0, 2), prefill_tokens=7, decode_blocks=1)
    old.end()
    assert ledger.account(SourceKey("w", 0, 2)).queued_tokens == 7


def test_a_source_that_flaps_keeps_what_is_promised_to_it() -> None:
    ledger, key = LoadLedger(Clock()), SourceKey("w", 0, 1)
    made = ledger.reserve(key, prefill_tokens=10, decode_blocks=2)
    ledger.prune(set())
    assert ledger.account(key).queued_tokens == 10
    made.end()
    assert ledger.totals() == (0, 0, 0)


def test_a_heartbeat_that_reports_our_own_promise_adds_nothing() -> None:
    clock = Clock()
    ledger, key = LoadLedger(clock), SourceKey("w", 0, 1)
    ledger.reserve(key, prefill_tokens=1000, decode_blocks=70)
    clock.now += 1
    account = ledger.account(key)
    account.heard(prefill_tokens=1000, decode_blocks=70, running=1, now=clock.now)
    assert (account.queued_tokens, account.pinned_blocks, account.running) == (1000, 70, 1)


def test_work_that_another_router_sent_is_counted_beside_ours() -> None:
    clock = Clock()
    ledger, key = LoadLedger(clock), SourceKey("w", 0, 1)
    ledger.reserve(key, prefill_tokens=1000, decode_blocks=70)
    clock.now += 1
    account = ledger.account(key)
    account.heard(prefill_tokens=5000, decode_blocks=400, running=3, now=clock.now)
    assert (account.queued_tokens, account.pinned_blocks, account.running) == (5000, 400, 3)


def test_progress_on_a_long_prefill_shows_but_a_promise_just_made_is_not_mistaken_for_progress() -> None:
    clock = Clock()
    ledger, key = LoadLedger(clock), SourceKey("w", 0, 1)
    long = ledger.reserve(key, prefill_tokens=10_000, decode_blocks=0)
    clock.now += 2
    ledger.reserve(key, prefill_tokens=300, decode_blocks=0)
    account = ledger.account(key)
    account.heard(prefill_tokens=4_000, decode_blocks=0, running=1, now=clock.now)
    assert account.queued_tokens == 4_300
    long.first_byte()
    assert account.queued_tokens == 300


def test_recent_work_fades() -> None:
    clock = Clock()
    ledger, key = LoadLedger(clock), SourceKey("w", 0, 1)
    ledger.reserve(key, prefill_tokens=1000, decode_blocks=0).end()
    assert ledger.account(key).recent_tokens(clock.now) == 1000
    assert ledger.account(key).recent_tokens(clock.now + 20 * RECENT_S) < 1
    assert Account().recent_tokens(5.0) == 0
