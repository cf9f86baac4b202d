"""Language models for the worker: reading checkpoints, and the forward pass over the paged context."""

from worker.models.config import ModelConfig
from worker.models.errors import ModelLoadError
from worker.models.load import load_model
from worker.models.transformer import AttentionContext, Model

__all__ = ["AttentionContext", "Model", "ModelConfig", "ModelLoadError", "load_model"]
