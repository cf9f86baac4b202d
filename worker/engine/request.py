"""What the engine is asked for, and what it answers: generations, their limits, their outputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from worker.sampling import Logprobs, SamplingSettings


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model said so, or a stop string or stop token came."""
    LENGTH = "length"
    """max_tokens, or the longest sequence, is reached."""
    ABORT = "abort"
    """The engine was shut down, or the request cancelled."""
    ERROR = "error"
    """The engine failed; `Output.error` says how."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When an answer ends."""

    max_tokens: int
    min_tokens: int = 0
    """Before so many tokens, stop tokens cannot be sampled and stop strings are not looked for."""
    token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer: the model's end tokens, unless ignored, and the request's own."""
    strings: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the stop string, or the text of the stop token, is part of the answer."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it."""

    prompt: list[int]
    limits: Limits
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    skip_special_tokens: bool = True
    cacheable: bool = True
    """False: the prompt's blocks are neither shared with others nor advertised."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token."""

    token: int
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Output:
    """What a generation has produced since its last output."""

    text: str = ""
    tokens: list[TokenOutput] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens that no forward computed when the prompt was first admitted; known with the first token."""
    queued_s: float | None = None
    """With the first token: how long the request waited for admission."""
    finish: FinishReason | None = None
    error: str | None = None

    def extend(self, later: Output) -> None:
        """Append what came next."""
        self.text += later.text
        self.tokens += later.tokens
        self.cached_tokens = later.cached_tokens
        self.queued_s = later.queued_s if self.queued_s is None else self.queued_s
        self.finish, self.error = later.finish, later.error


class QueueFullError(Exception):
    """Too many requests wait already; `waiting` and `limit` say how many."""

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests wait and the limit is {limit}")
        self.waiting, self.limit = waiting, limit


class EngineStoppedError(Exception):
    """The engine takes no requests any more."""
