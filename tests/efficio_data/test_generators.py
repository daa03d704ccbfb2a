import functools
import random

import numpy as np
import torch

from efficio_data._generators import find_generators, key_generators


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def draw(self):
        return self.generator.random()


def test_generators_are_found_in_nested_attributes_once_each():
    shared = np.random.default_rng(0)
    inner = Holder(generator=random.Random(1))
    owner = Holder(
        a=shared,
        b=[Holder(c=torch.Generator(), d=shared)],
        e={"f": (np.random.RandomState(2),)},
        g=inner.draw,
        h=functools.partial(Holder, generator=np.random.default_rng(5)),
    )
    owner.loop = owner
    kinds = sorted(type(g).__name__ for g in find_generators(owner))
    assert kinds == ["Generator", "Generator", "Generator", "Random", "RandomState"]


def test_global_generators_and_large_lists_are_left_out():
    assert find_generators(Holder(a=torch.default_generator, b=random._inst, c=list(range(1_000_000)))) == ()


def test_a_key_repeats_every_kind_and_two_generators_differ():
    owned = (
        torch.Generator(),
        random.Random(),
        np.random.default_rng(),
        np.random.RandomState(),
        random.Random(),
    )

    def draws():
        return [
            torch.rand(1, generator=owned[0]).item(),
            owned[1].random(),
            owned[2].random(),
            owned[3].rand(),
            owned[4].random(),
        ]

    key_generators(owned, 99)
    one = draws()
    draws()
    key_generators(owned, 99)
    assert draws() == one
    assert len(set(one)) == 5
