"""What goes wrong while a model is loaded."""


class ModelLoadError(ValueError):
    """A checkpoint that cannot be served; the message names file, field or tensor, and the remedy."""
