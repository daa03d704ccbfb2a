"""The right number format on every GPU, and the training step done right."""

__all__: list[str] = []
__version__ = "0.3.0"
