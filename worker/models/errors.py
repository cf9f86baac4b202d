"""What goes wrong while a model is loaded."""


class ModelLoadError(ValueError):
    """A checkpoint that cannot be served; the message names the file, the field or tensor, and what is supported."""
