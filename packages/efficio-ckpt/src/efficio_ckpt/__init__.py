"""Checkpoints that survive the machine: atomic, verified, in the background, without pickle."""

__all__: list[str] = []
__version__ = "0.3.0"
