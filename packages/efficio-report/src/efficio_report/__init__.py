"""Where the training time went, what the GPU did, and what to change."""

__all__: list[str] = []
__version__ = "0.3.0"
