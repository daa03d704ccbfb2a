"""A fed GPU: resumable order, GPU-resident data, image caches and batch augmentation."""

__all__: list[str] = []
__version__ = "0.3.0"
