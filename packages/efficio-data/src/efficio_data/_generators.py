"""Generators that a dataset, its transforms or a sampler own: found through their attributes, and started from keys."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ._keys import derive_seed

_MAX_DEPTH = 6
_MAX_OBJECTS = 10_000  # a dataset may hold a list of a million records; generators sit near the top
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, type)


def find_generators(owner: Any) -> tuple[Any, ...]:
    """The random generators that hang on an object: `torch.Generator`, `random.Random`, NumPy's `Generator` and `RandomState`.

    Attributes, lists, tuples, sets and dicts are followed, six levels deep and ten thousand objects wide. A generator hidden in
    a closure, in a global or in a C extension is not found.

    Args:
        owner: Any object; it is only read.

    Returns:
        The generators, each once, in the order of attributes, which is the same in every process that builds the same object.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    level: list[Any] = [owner]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, _LEAVES) or id(item) in seen:
                continue
            if len(seen) >= _MAX_OBJECTS:
                return tuple(found.values())
            seen.add(id(item))
            if isinstance(item, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
                if not _is_global(item):
                    found[id(item)] = item
                continue
            below.extend(_parts(item))
        level = below
    return tuple(found.values())


def _is_global(item: Any) -> bool:
    """Whether it is one of the three global generators, which are keyed anyway."""
    return item is torch.default_generator or item is getattr(random, "_inst", None)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())[:_MAX_OBJECTS]
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)[:_MAX_OBJECTS]
    parts = list(vars(item).values()) if hasattr(item, "__dict__") else []
    bound = getattr(item, "__self__", None)  # a bound method as a transform
    partial = (
        [getattr(item, name, None) for name in ("func", "args", "keywords")] if hasattr(item, "func") else []
    )
    return [*parts, bound, *partial]


def key_generators(generators: tuple[Any, ...], key: int) -> None:
    """Start each of the generators from the key and its place in the tuple.

    Args:
        generators: As `find_generators` gave them; changed in place.
        key: An int in [0, 2**64).
    """
    for place, generator in enumerate(generators):
        own = derive_seed(key, place)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(own & 0xFFFFFFFF)
        else:
            fresh = type(generator.bit_generator)(own)
            generator.bit_generator.state = fresh.state
