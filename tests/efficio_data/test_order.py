import pytest
import torch

from efficio_data import epoch_order


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_an_order_is_a_permutation(size):
    order = epoch_order(size, seed=3, epoch=4)
    assert order.dtype == torch.int64
    assert order.sort().values.tolist() == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_order(20, seed=s, epoch=e).tolist()) for s in range(10) for e in range(10)}
    assert len(orders) == 100


def test_each_place_gets_each_index_equally_often():
    counts = torch.zeros(8, 8)
    for epoch in range(4000):
        counts[torch.arange(8), epoch_order(8, seed=0, epoch=epoch)] += 1
    chi_square = ((counts - 500) ** 2 / 500).sum().item()
    assert chi_square < 100  # 49 degrees of freedom: exceeded by chance once in 30,000 times


def test_the_order_is_the_same_for_ever():
    assert epoch_order(10, seed=1, epoch=2).tolist() == GOLDEN


def test_negative_arguments_are_refused():
    with pytest.raises(ValueError, match="epoch=-1"):
        epoch_order(3, seed=0, epoch=-1)


GOLDEN = [0, 1, 6, 5, 2, 8, 4, 3, 9, 7]
