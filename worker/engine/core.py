"""One engine step: admit, forward, sample, publish, judge, update, deliver; and what happens when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from context import DynamicInferenceContext
from serving.tokenizer import Tokenizer
from worker.engine.generation import Generation, OutputSink
from worker.engine.request import FinishReason, GenerationRequest, Output
from worker.engine.scheduler import Scheduler
from worker.engine.stats import EngineCounters, LoadSnapshot
from worker.sampling import Sampled, sample

log = logging.getLogger(__name__)

_FAILURES_ALLOWED = 1
"""A generation whose step failed is tried once more."""


class LanguageModel(Protocol):
    """The forward pass that the engine drives (`worker.models.Model`)."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: DynamicInferenceContext,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        """Logits `[1, rows, V]` of a step's packed tokens `[1, N]`; keys and values go into the context."""
        ...


class Verdict(NamedTuple):
    """A row's outcome in one step."""

    generation: Generation | None
    """None: a prompt that is only partly in."""
    token: int
    output: Output | None

    @property
    def goes_on(self) -> bool:
        """Whether the row stays in the batch."""
        return self.output is None or self.output.finish is None


class EngineCore:
    """The engine without its thread.  One thread calls everything.

    Args:
        on_step_end: called once a step after all of the step's KV events were told (`EventPublisher.end_step`).
    """

    def __init__(
        self,
        model: LanguageModel,
        context: DynamicInferenceContext,
        tokenizer: Tokenizer,
        *,
        on_step_end: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._tokenizer = tokenizer
        self._on_step_end = on_step_end
        self._numbers = count()
        self.scheduler = Scheduler(context)
        self.counters = EngineCounters()
        self.load = self._snapshot()

    @property
    def context(self) -> DynamicInferenceContext:
        """The inference context; for reading, between steps."""
        return self._context

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: the context's limit, or what all blocks together hold."""
        usable = self._context.kv_block_allocator.total_count - 1
        return min(self._context.max_sequence_length, usable * self._context.block_size_tokens)

    # -- requests --------------------------------------------------------------------------------------------------

    def prepare(self, request: GenerationRequest, sink: OutputSink) -> Generation:
        """A generation ready to be added; hashes the prompt's blocks.  May be called on any thread."""
        return Generation(
            next(self._numbers) % 2**31,
            request,
            self._tokenizer,
            sink,
            block_size=self._context.block_size_tokens,
            caching=self._context.enable_prefix_caching,
        )

    def add(self, generation: Generation) -> None:
        """Queue a generation."""
        self.scheduler.add(generation)

    def abort(self, numbers: Iterable[int]) -> None:
        """End generations and free their blocks, between two steps; unknown numbers have ended already."""
        for generation in self.scheduler.remove(numbers):
            self._end(generation, FinishReason.ABORT)
        self.load = self._snapshot()

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run one step for everything that is admitted; does nothing without work."""
        if not self.has_work:
            return
        began = time.perf_counter()
        self._schedule()
        if self._context.get_active_request_count():
            self._run_batch()
        self._tell_step_end()
        self.load = self._snapshot()
        self.counters.step_seconds += time.perf_counter() - began

    def _run_batch(self) -> None:
        batch = self.scheduler.in_step()
        try:
            logits = self._forward()
            sampled = self._sample(logits, batch)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, `_recover` undoes the step
            self._recover(batch, error)
            return
        self._publish()
        verdicts = self._judge(batch, sampled)
        self._update(verdicts)
        self._deliver(verdicts)

    def _schedule(self) -> None:
        self._context.dynamo_helper.discard_pending_kv_stored_events()
        self.scheduler.admit()
        for generation, error in self.scheduler.refused:
            self._end(generation, FinishReason.ERROR, str(error))
        self.scheduler.refused.clear()
        if not self._context.get_active_request_count():
            self._unblock()

    def _forward(self) -> Tensor:
        """Logits `[A, V]`, one row an active request."""
        context = self._context
        context.initialize_attention_state()
        input_ids, position_ids = context.current_input_and_position_ids()
        if input_ids.device.type == "cpu":
            # Padding is for kernels and graphs of fixed shape; on a CPU it would be computed for nothing.
            real = context.active_token_count
            input_ids, position_ids = input_ids[:, :real], position_ids[:, :real]
        began = time.perf_counter()
        logits = self._model.forward(input_ids, position_ids, context, logit_rows=context.last_token_rows())
        self.counters.forward_seconds += time.perf_counter() - began
        self.counters.computed_tokens += context.active_token_count
        return logits[0]

    def _sample(self, logits: Tensor, batch: list[Generation | None]) -> list[Sampled]:
        """One token a row; a prompt that is only partly in has none to sample."""
        began = time.perf_counter()
        wanted = [index for index, generation in enumerate(batch) if generation is not None]
        rows = [generation.row() for generation in batch if generation is not None]
        if len(wanted) < len(batch):
            logits = logits[wanted]
        drawn = iter(sample(logits, rows) if rows else ())
        self.counters.sample_seconds += time.perf_counter() - began
        return [Sampled(0) if generation is None else next(drawn) for generation in batch]

    def _publish(self) -> None:
        self._context.dynamo_helper.publish_pending_kv_stored_events()
        self._context.advance_step()
        self.counters.steps += 1

    def _judge(self, batch: list[Generation | None], sampled: list[Sampled]) -> list[Verdict]:
        longest = self.max_length
        return [
            Verdict(
                generation,
                result.token,
                None if generation is None else generation.take(result, longest),
            )
            for generation, result in zip(batch, sampled, strict=True)
        ]

    def _update(self, verdicts: list[Verdict]) -> None:
        mask = torch.tensor([verdict.goes_on for verdict in verdicts], dtype=torch.int32)
        tokens = torch.tensor([verdict.token for verdict in verdicts], dtype=torch.int64)
        result = self._context.update_requests(mask, tokens)
        for verdict in verdicts:
            generation = verdict.generation
            if generation is None:
                continue
            generation.failures = 0
            self.counters.generated_tokens += 1
            if len(generation.tokens) == 1:
                self.counters.prompt_tokens += len(generation.request.prompt)
                self.counters.cached_tokens += generation.cached_tokens or 0
            if not verdict.goes_on:
                self.scheduler.finished(generation)
        if self.scheduler.chunked is not None:
            self.scheduler.chunked.failures = 0
        self._requeue_evicted(result)

    def _requeue_evicted(self, result: dict[str, Tensor | None] | None) -> None:
        evicted = None if result is None else result["evict_request_ids"]
        if evicted is not None and len(evicted):
            self.counters.preemptions += len(evicted)
            self.scheduler.requeue(evicted.tolist())

    def _deliver(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.generation is None or verdict.output is None:
                continue
            if verdict.output.finish is not None:
                self.counters.finished[verdict.output.finish] += 1
            verdict.generation.sink(verdict.output)

    def _tell_step_end(self) -> None:
        if self._on_step_end is not None:
            self._on_step_end()

    # -- when it does not go on ------------------------------------------------------------------------------------

    def _unblock(self) -> None:
        """Nothing is active though there is work: break the stand-off of who holds blocks and waits for others."""
        left = self._context.release_stalled()
        self.counters.preemptions += len(left)
        self.scheduler.requeue(left)
        if not left and not self._context.get_active_request_count() and self.scheduler.waiting:
            generation = self.scheduler.waiting.popleft()
            log.error("engine.unschedulable", extra={"prompt_tokens": len(generation.request.prompt)})
            self._end(generation, FinishReason.ERROR, "the request does not fit the empty cache")

    def _recover(self, batch: list[Generation | None], error: Exception) -> None:
        """Undo a failed step.  Everyone in it is tried once more; who was in two failed steps in a row ends."""
        self.counters.step_failures += 1
        log.error("engine.step_failed", exc_info=error, extra={"rows": len(batch)})
        part_way = self.scheduler.chunked
        affected = [g if g is not None else part_way for g in batch]
        self.scheduler.requeue(self._context.rollback_step())
        failed = []
        for generation in affected:
            if generation is None:
                continue
            generation.failures += 1
            if generation.failures > _FAILURES_ALLOWED:
                failed.append(generation.number)
        for generation in self.scheduler.remove(failed):
            self._end(generation, FinishReason.ERROR, f"the model failed twice: {type(error).__name__}")

    def reset(self, error: str) -> None:
        """Give up everything and empty the context, after an error that left its state unknown."""
        generations = self.scheduler.everything()
        self.scheduler.clear()
        self._context.reset()
        self._tell_step_end()
        self.counters.resets += 1
        for generation in generations:
            self._end(generation, FinishReason.ERROR, error)
        self.load = self._snapshot()

    def _end(self, generation: Generation, reason: FinishReason, error: str | None = None) -> None:
        self.counters.finished[reason] += 1
        generation.sink(Output(cached_tokens=generation.cached_tokens or 0, finish=reason, error=error))

    # -- what others see -------------------------------------------------------------------------------------------

    def _snapshot(self) -> LoadSnapshot:
        allocator, scheduler = self._context.kv_block_allocator, self.scheduler
        total = allocator.total_count - 1
        evictable = allocator.get_evictable_block_count()
        return LoadSnapshot(
            running=len(scheduler.running),
            waiting=scheduler.waiting_count,
            waiting_prompt_tokens=scheduler.waiting_prompt_tokens,
            used_blocks=total - allocator.pool_avail - evictable,
            cached_blocks=evictable,
            total_blocks=total,
        )
