"""Time budgets, stop signals and platform facts for training that must end on time."""

__all__: list[str] = []
__version__ = "0.3.0"
