"""Random schedules over small pools: every invariant after every call, answers equal to a one-at-a-time engine's."""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from context import PrefixCachingEvictionPolicy, ResumePolicy
from tests.context.engine_model import EngineModel, build_context

# Few distinct prefixes, so that prompts meet in the cache.
PREFIXES = [[1] * 9, [1, 2, 3, 4] * 3, [4, 4, 4, 4, 0, 0, 0, 0], []]


class ContextMachine(RuleBasedStateMachine):
    """Drives the real context as an engine does."""

    @initialize(
        blocks=st.integers(4, 24),
        paused=st.integers(0, 2),
        policy=st.sampled_from(PrefixCachingEvictionPolicy),
        resume=st.sampled_from(ResumePolicy),
        caching=st.sampled_from([True, True, True, False]),
        chunked=st.booleans(),
        generated=st.booleans(),
        max_requests=st.integers(1, 5),
        max_tokens=st.integers(12, 40),
    )
    def start(self, blocks, paused, policy, resume, caching, chunked, generated, max_requests, max_tokens):  # type: ignore[no-untyped-def]
        self.engine = EngineModel(
            build_context(
                blocks=blocks,
                paused_blocks=min(paused, blocks - 1),
                prefix_caching_eviction_policy=policy,
                resume_policy=resume,
                enable_prefix_caching=caching,
                enable_chunked_prefill=chunked,
                hash_generated_blocks=generated,
                max_requests=max_requests,
                max_tokens=max_tokens,
            )
        )
        self.longest = min(4 * blocks, max_tokens) - 1
        self.next_id = 0

    @rule(prefix=st.sampled_from(PREFIXES), tail=st.lists(st.integers(0, 4), max_size=9), generate=st.integers(1, 14))
    def submit(self, prefix, tail, generate):  # type: ignore[no-untyped-def]
        prompt = (prefix + tail)[: self.longest] or [0]
        generate = min(generate, self.longest + 1 - len(prompt))
        self.engine.submit(self.next_id, prompt, generate)
        self.next_id += 1

    @rule(chunk=st.integers(2, 9))
    def step(self, chunk):  # type: ignore[no-untyped-def]
        self.engine.step(chunk_limit=max(chunk, 3))

    @rule(chunk=st.integers(3, 9))
    def step_whose_forward_fails(self, chunk):  # type: ignore[no-untyped-def]
        self.engine.step(chunk_limit=chunk, fail=True)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def step_in_which_a_request_stops(self, data):  # type: ignore[no-untyped-def]
        self.engine.step(stop={data.draw(st.sampled_from(sorted(self.engine.running)))})

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def abort(self, data):  # type: ignore[no-untyped-def]
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.running))))

    @rule(preserve=st.booleans())
    def reset(self, preserve):  # type: ignore[no-untyped-def]
        self.engine.reset(preserve=preserve)

    @invariant()
    def context_is_whole(self):  # type: ignore[no-untyped-def]
        if hasattr(self, "engine"):
            self.engine.context.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run_dry()
        for job in self.engine.finished.values():
            assert job.generated == job.expected()[: len(job.generated)], "an answer depends on the schedule"
        assert self.engine.context.active_token_count == 0


ContextMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("WARMROUTE_PROPERTY_EXAMPLES", "200")),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestContextUnderAnySchedule = ContextMachine.TestCase
