"""One request on its way through the engine: its tokens so far, its text, and when it is over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

from context import DynamicInferenceRequest, SamplingParams
from serving.tokenizer import IncrementalDecoder, Tokenizer
from worker.engine.request import FinishReason, GenerationRequest, Output, TokenOutput
from worker.engine.stop import StopStrings
from worker.sampling import Row, Sampled, TokenHistory

OutputSink = Callable[[Output], None]
"""Where a generation's outputs go; called on the engine's thread, must not block."""


class Generation:
    """The state of one request in the engine.  Only the engine's thread touches it after construction."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        sink: OutputSink,
        *,
        block_size: int,
        caching: bool,
    ) -> None:
        self.number = number
        """The context's request id."""
        self.request = request
        self.sink = sink
        self.tokens: list[int] = []
        """Generated so far, the stop token included."""
        self.cached_tokens: int | None = None
        """Known once the whole prompt has been admitted the first time."""
        self.failures = 0
        self.submitted_at = time.perf_counter()
        self.queued_s: float | None = None
        """From submission to the first admission."""
        self._block_size = block_size
        self._caching = caching and request.cacheable
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=request.skip_special_tokens)
        self._stop = StopStrings(request.limits.strings, include=request.limits.include_stop)
        self._history = TokenHistory(frozenset(request.prompt), Counter()) if request.sampling.has_penalties else None
        self.admission = self._admission_request()
        """The prompt as the context takes it; after an eviction, prompt and generated tokens."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt) + len(self.tokens)

    def begin_again(self) -> None:
        """The context gave the generation up: admit prompt and generated tokens as one prompt."""
        self.admission = self._admission_request()

    def note_admitted(self) -> None:
        """The whole prompt is in the context."""
        if self.cached_tokens is None:
            self.cached_tokens = self.admission.num_skipped_tokens
            self.queued_s = time.perf_counter() - self.submitted_at

    def row(self) -> Row:
        """What the sampler must know for the next token."""
        limits = self.request.limits
        banned = tuple(limits.token_ids) if len(self.tokens) < limits.min_tokens else ()
        return Row(self.request.sampling, self.length, self._history, banned)

    def take(self, sampled: Sampled, max_length: int) -> Output:
        """Add a sampled token; the output says what it shows and whether it is the last one."""
        limits, token = self.request.limits, sampled.token
        armed = len(self.tokens) >= limits.min_tokens
        self.tokens.append(token)
        if self._history is not None:
            self._history.answer[token] += 1
        output = Output(tokens=[TokenOutput(token, sampled.logprobs)], cached_tokens=self.cached_tokens or 0)
        if len(self.tokens) == 1:
            output.queued_s = self.queued_s
        if armed and token in limits.token_ids:
            text = self._decoder.push(token) if limits.include_stop else ""
            output.text = self._stop.flush() + text + self._decoder.flush()
            output.finish = FinishReason.STOP
            return output
        checked = self._stop.push(self._decoder.push(token), armed=armed)
        output.text = checked.text
        if checked.is_stopped:
            output.finish = FinishReason.STOP
        elif len(self.tokens) >= limits.max_tokens or self.length >= max_length:
            self._end_by_length(output)
        return output

    def _end_by_length(self, output: Output) -> None:
        rest = self._stop.push(self._decoder.flush())
        output.text += rest.text + ("" if rest.is_stopped else self._stop.flush())
        output.finish = FinishReason.STOP if rest.is_stopped else FinishReason.LENGTH

    def _admission_request(self) -> DynamicInferenceRequest:
        tokens = self.request.prompt + self.tokens
        return DynamicInferenceRequest(
            self.number,
            torch.tensor(tokens, dtype=torch.int64),
            SamplingParams(num_tokens_to_generate=self.request.limits.max_tokens - len(self.tokens)),
            block_size_tokens=self._block_size,
            enable_prefix_caching=self._caching,
        )
