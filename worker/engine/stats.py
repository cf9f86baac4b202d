"""What the engine tells of itself: one immutable snapshot a step, and counters that only grow."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The engine's load after a step."""

    running: int = 0
    waiting: int = 0
    waiting_prompt_tokens: int = 0
    """Prompt tokens not computed yet."""
    used_blocks: int = 0
    """Blocks that requests hold; what is only cached can be taken and does not count."""
    cached_blocks: int = 0
    """Blocks kept for prompts to come."""
    total_blocks: int = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0


@dataclass(slots=True)
class EngineCounters:
    """Written by the engine's thread only; others read."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of prompts that were wholly admitted, each once."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through a forward, prompts and decode together."""
    generated_tokens: int = 0
    preemptions: int = 0
    step_failures: int = 0
    """Forwards (or samplings) that raised."""
    resets: int = 0
    """Times the whole context was reset after an error outside the forward."""
    integrity_failures: int = 0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    step_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    """Generations that ended, by reason."""
