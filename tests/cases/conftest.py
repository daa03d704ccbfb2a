import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def own_generators():
    """What these tests draw is no other test's business."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


@pytest.fixture
def clock():
    """Seconds that pass only when told."""
    return Clock()


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now
