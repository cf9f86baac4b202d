"""Any schedule of loss, duplication, delay, reordering, restarts and overflow: the view is always a true past, and
once quiet it is the present.
"""

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvevents.messages import Message, decode_message
from kvevents.publisher import Snapshot
from kvevents.source import Source, State, Trust
from kvevents.types import SourceBeat, SourceId

from .support import BLOCK, MODEL, Engine, SetSink, new_engine, source_beat

_EXAMPLES = int(os.environ.get("WARMROUTE_PROPERTY_EXAMPLES", "60"))
_LEASE_S = 3.0


class FaultyChannel(RuleBasedStateMachine):
    """One engine, one source, and between them a channel that does what it likes."""

    engine: Engine

    @initialize()
    def begin(self) -> None:
        self.now, self.epoch = 0.0, 1_000
        self.sink = SetSink()
        self.source = Source(SourceId("w.1", 0), MODEL, BLOCK, self.sink, lease_s=_LEASE_S)
        self.way: list[Message | SourceBeat] = []
        self.answers: list[Snapshot | tuple[int, list[Message]]] = []
        self.past: dict[tuple[int, int], frozenset[int]] = {}
        self.place = (0, 0)
        self._new_engine()

    def _new_engine(self) -> None:
        self.engine = new_engine(epoch=self.epoch, seed=self.epoch, queue_messages=3, ring_messages=6)
        self._remember()

    def _remember(self) -> None:
        """What the engine holds after each message, as nobody but the engine can know."""
        state = self.engine.publisher.state()
        self.past[state.epoch, state.seq] = frozenset(self.engine.truth())

    # -- the engine ------------------------------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 4), pick=st.integers(0, 50))
    def store(self, blocks: int, pick: int) -> None:
        held = [None, *self.engine.parent]
        self.engine.store(blocks, held[pick % len(held)])
        self._end_step()

    @rule(most=st.integers(1, 5))
    def evict(self, most: int) -> None:
        self.engine.remove_leaves(most)
        self._end_step()

    @rule()
    def clear(self) -> None:
        self.engine.clear()
        self._end_step()

    def _end_step(self) -> None:
        self.engine.publisher.end_step()
        self._remember()

    @rule(up=st.booleans())
    def restart(self, up: bool) -> None:
        """A new incarnation; the clock may have gone back.  What the old one sent may still arrive."""
        self.send()
        used = {epoch for epoch, _ in self.past}
        self.epoch = max(used) + 7 if up else min(used) - 7
        self._new_engine()

    # -- the channel -----------------------------------------------------------------------------------------------

    @rule()
    def send(self) -> None:
        """What the queue has taken goes on its way; what it has dropped is lost."""
        while data := self.engine.publisher.take():
            self.way.append(decode_message(data))

    @rule()
    def beat(self) -> None:
        self.send()
        self.way.append(source_beat(self.engine.publisher))

    @precondition(lambda self: self.way)
    @rule(pick=st.integers(0, 3), times=st.integers(0, 2))
    def deliver(self, pick: int, times: int) -> None:
        """The first on its way or a later one, not at all, once or twice."""
        one = self.way.pop(min(pick, len(self.way) - 1))
        for _ in range(times):
            self._arrive(one)

    @precondition(lambda self: self.way)
    @rule(pick=st.integers(0, 9))
    def deliver_and_keep(self, pick: int) -> None:
        """A duplicate that arrives much later."""
        self._arrive(self.way[min(pick, len(self.way) - 1)])

    @rule()
    def deliver_all(self) -> None:
        for one in self.way:
            self._arrive(one)
        self.way.clear()

    def _arrive(self, one: Message | SourceBeat) -> None:
        if isinstance(one, Message):
            self.source.hear(one, self.now)
        else:
            self.source.beat(one, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.source.tick(self.now)

    @rule()
    def reconnect(self) -> None:
        self.source.distrust("the bus reconnected", self.now)

    # -- repairs ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.source.needs_repair)
    @rule()
    def ask(self) -> None:
        """The answer is of now and arrives whenever."""
        publisher = self.engine.publisher
        since = None if self.source.wants_snapshot else publisher.events_since(self.source.epoch, self.source.seq)
        if since is None:
            self.answers.append(publisher.snapshot())
            self._remember()
        else:
            self.answers.append((self.source.seq, [decode_message(data) for data in since]))

    @precondition(lambda self: self.answers)
    @rule(pick=st.integers(0, 5))
    def answer(self, pick: int) -> None:
        answer = self.answers.pop(min(pick, len(self.answers) - 1))
        if isinstance(answer, Snapshot):
            state, blocks = answer
            self.source.repaired_by_snapshot(blocks.copy(), state.epoch, state.seq, self.now)
        else:
            self.source.repaired_by_events(answer[1], self.now)

    @rule()
    def quiet(self) -> None:
        """No faults any more: heartbeats once a second, and repairs that answer."""
        self.deliver_all()
        self.answers.clear()
        lower = self.engine.publisher.epoch < self.source.newest_epoch
        for _ in range(2 + int(_LEASE_S) * lower):
            self.now += 1.0
            self.beat()
            self.deliver_all()
            for _ in range(3):
                self.source.tick(self.now + 0.2)
                if self.source.needs_repair:
                    self.ask()
                    self.answer(0)
        assert (self.source.state, self.source.trust) == (State.LIVE, Trust.EXACT), self.source.reason
        assert self.sink.sets[self.source.handle] == self.engine.truth()
        assert (self.source.epoch, self.source.lag) == (self.engine.publisher.epoch, 0)

    # -- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def the_view_is_what_the_source_held_after_the_last_applied_message(self) -> None:
        view = self.sink.sets[self.source.handle]
        assert view == self.past.get((self.source.epoch, self.source.seq), frozenset())
        assert view == set(self.source.device_hashes().tolist())

    @invariant()
    def the_view_never_goes_back(self) -> None:
        epoch, seq = self.place
        assert self.source.epoch != epoch or self.source.seq >= seq
        self.place = (self.source.epoch, self.source.seq)

    @invariant()
    def everything_agrees_with_itself(self) -> None:
        self.source.check_integrity()
        self.engine.publisher.check_integrity()

    def teardown(self) -> None:
        self.quiet()


FaultyChannel.TestCase.settings = settings(max_examples=_EXAMPLES, stateful_step_count=40, deadline=None)
TestFaultyChannel = FaultyChannel.TestCase
