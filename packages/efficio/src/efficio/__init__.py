"""More training out of every GPU hour, and a resume that is the same run."""

__all__: list[str] = []
__version__ = "0.3.0"
