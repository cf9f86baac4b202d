"""Who runs in the next step: the waiting queue, admission of prompts whole or in chunks, and who starts over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from context import ContextOverflowError, DynamicInferenceContext, DynamicInferenceRequest
from worker.engine.generation import Generation

_LEAST_CHUNK = 2
"""A prefill of one token would look like decode to the kernels."""


class Scheduler:
    """Owns the waiting queue and knows what is in the context (spec: context core, section 11).

    At most one prompt is partly in (`chunked`); it comes before everything that waits.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context
        self.waiting: deque[Generation] = deque()
        self.running: dict[int, Generation] = {}
        """Whole prompts in the context, by number."""
        self.chunked: Generation | None = None
        self.refused: list[tuple[Generation, ContextOverflowError]] = []
        """Generations that can never fit; the engine ends them."""

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running or self.chunked)

    @property
    def waiting_count(self) -> int:
        """Generations whose prompt is not wholly in the context."""
        return len(self.waiting) + (self.chunked is not None)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens that still have to be computed, or found in the cache."""
        rest = self.chunked.admission.remaining_prompt_length if self.chunked else 0
        return rest + sum(generation.admission.remaining_prompt_length for generation in self.waiting)

    # -- a step's admissions ---------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Fill what the step's token budget leaves after the decoding rows: the open chunk first, then the queue.

        Blocks are registered as a prompt is admitted, so a prompt behind it in the same step shares them at once; one
        that shares with a prompt only partly in waits, for nothing is admitted behind an open chunk.
        """
        if self.chunked is not None and not self._admit(self.chunked):
            return
        while self.waiting and self.chunked is None:
            if not self._has_room(self.waiting[0].admission) or not self._admit(self.waiting[0]):
                break

    def _has_room(self, request: DynamicInferenceRequest) -> bool:
        row, _, blocks = self._context.check_availability(request)
        return row and blocks

    def _admit(self, generation: Generation) -> bool:
        """Put as much of a prompt into the step as fits; False if nothing does."""
        request = generation.admission
        span = self._span(request)
        if not span:
            return False
        try:
            self._context.add_request(request, prefill_chunk_length=span)
        except ContextOverflowError as error:
            if error.is_transient:
                return False
            self._drop(generation)
            self.refused.append((generation, error))
            return True
        request.advance_chunk(span)
        if self.waiting and self.waiting[0] is generation:
            self.waiting.popleft()
        if request.remaining_prompt_length:
            self.chunked = generation
        else:
            if self.chunked is generation:
                self.chunked = None
            self.running[generation.number] = generation
            generation.note_admitted()
        return True

    def _span(self, request: DynamicInferenceRequest) -> int:
        """Tokens of the next chunk; cached ones cost no budget, and one token alone is never left for the last."""
        remaining = request.remaining_prompt_length
        budget = self._context.max_tokens - self._context.active_token_count
        skip = self._context._compute_prefix_match(request, remaining).prefix_skip_tokens
        if remaining - skip <= budget:
            return remaining
        span = skip + budget
        if remaining - span == 1:
            span -= 1
        return span if span - skip >= _LEAST_CHUNK else 0

    # -- coming and going ------------------------------------------------------------------------------------------

    def add(self, generation: Generation) -> None:
        """Queue a new generation."""
        self.waiting.append(generation)

    def in_step(self) -> list[Generation | None]:
        """The generations of the active rows, in row order; None for a prompt that is only partly in."""
        context = self._context
        rows = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        return [self.running.get(number) for number in rows]

    def finished(self, generation: Generation) -> None:
        """A generation ended; `update_requests` releases its row."""
        del self.running[generation.number]

    def requeue(self, numbers: Sequence[int]) -> None:
        """Put generations that lost their rows back to the head of the queue, in the given order."""
        back = []
        for number in numbers:
            if self.chunked is not None and self.chunked.number == number:
                back.append(self.chunked)
                self.chunked = None
            else:
                back.append(self.running.pop(number))
        for generation in reversed(back):
            generation.begin_again()
            self.waiting.appendleft(generation)

    def remove(self, numbers: Iterable[int]) -> list[Generation]:
        """Take generations out wherever they are, between two steps, and release their blocks; those found."""
        wanted = set(numbers)
        removed = [g for g in self.waiting if g.number in wanted]
        self.waiting = deque(g for g in self.waiting if g.number not in wanted)
        inside = [self.running.pop(number) for number in wanted & self.running.keys()]
        if self.chunked is not None and self.chunked.number in wanted:
            inside.append(self.chunked)
            self.chunked = None
        if inside:
            self._context.remove_requests([generation.number for generation in inside])
        return removed + inside

    def everything(self) -> list[Generation]:
        """All generations, running ones first."""
        chunked = [self.chunked] if self.chunked else []
        return [*self.running.values(), *chunked, *self.waiting]

    def clear(self) -> None:
        """Forget all generations; the caller resets the context."""
        self.waiting.clear()
        self.running.clear()
        self.chunked = None
        self.refused.clear()

    def _drop(self, generation: Generation) -> None:
        if self.chunked is generation:
            self._context.remove_requests([generation.number])
            self.chunked = None
        elif self.waiting and self.waiting[0] is generation:
            self.waiting.popleft()
