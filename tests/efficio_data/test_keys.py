import random

import numpy as np
import torch

from efficio_data import derive_seed, seed_generators
from efficio_data._keys import isolated_generators


def draws():
    return torch.rand(3).tolist(), random.random(), np.random.rand()


def test_no_two_of_ten_thousand_epoch_keys_are_equal_even_in_their_low_half():
    keys = {derive_seed(seed, "sample", epoch) for seed in range(100) for epoch in range(100)}
    assert len(keys) == 10_000
    # 32 bits hold the 10,000 keys with about 0.01 expected collisions
    assert len({key & 0xFFFFFFFF for key in keys}) == 10_000


def test_neighbouring_keys_start_uncorrelated_streams():
    first = []
    for epoch in range(2000):
        seed_generators(derive_seed(0, epoch, 0))
        first.append(torch.rand(1).item())
    one, two = np.array(first[:-1]), np.array(first[1:])
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.09  # four standard deviations of 2000 independent pairs
    assert abs(np.mean(first) - 0.5) < 0.03


def test_a_key_fixes_all_three_global_generators():
    seed_generators(derive_seed(5, "x"))
    one = draws()
    draws()
    seed_generators(derive_seed(5, "x"))
    assert draws() == one
    seed_generators(derive_seed(5, "y"))
    two = draws()
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_isolated_generators_come_back_also_after_an_exception():
    seed_generators(1)
    expected = draws()
    seed_generators(1)
    try:
        with isolated_generators():
            draws()
            raise KeyError
    except KeyError:
        pass
    assert draws() == expected


def test_keys_are_the_same_for_ever():
    assert derive_seed(0) == 16294208416658607535
    assert derive_seed(7, "loop", 3) == GOLDEN
    assert derive_seed(-1, 2) != derive_seed(1, 2)


GOLDEN = 2000326604356408920


def test_the_generators_of_a_backend_that_is_not_in_use_yet_are_made_first(monkeypatch):
    made = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(
        torch.cuda, "init", lambda: monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    )
    with isolated_generators():
        seed_generators(7, device=torch.device("cuda:0"))
    assert made.initial_seed() == 7
