"""The engine: continuous batching over the inference context, on one thread."""

from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.engine.request import (
    EngineStoppedError,
    FinishReason,
    GenerationRequest,
    Limits,
    Output,
    QueueFullError,
    TokenOutput,
)
from worker.engine.stream import OutputStream

__all__ = [
    "Engine",
    "EngineCore",
    "EngineStoppedError",
    "FinishReason",
    "GenerationRequest",
    "Limits",
    "Output",
    "OutputStream",
    "QueueFullError",
    "TokenOutput",
]
