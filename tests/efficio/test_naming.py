import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from efficio._naming import is_scheduler, loop_name, object_names


def names(*objects, taken=None, **named):
    return list(object_names(objects, named, taken=taken or {}))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), 0.1)


class Average:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_objects_go_by_their_kind_with_an_ordinal():
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = optimizer_of(one), optimizer_of(two)
    scheduler = schedules.StepLR(first, 1)
    plateau = schedules.ReduceLROnPlateau(second)
    given = (one, two, first, second, scheduler, plateau, Average(), Average())
    expected = ["model", "model_2", "optimizer", "optimizer_2", "scheduler", "scheduler_2"]
    assert names(*given) == [*expected, "average", "average_2"]


def test_a_name_depends_on_the_order_within_a_kind_only():
    model = nn.Linear(1, 1)
    optimizer = optimizer_of(model)
    assert sorted(names(model, optimizer)) == sorted(names(optimizer, model))


def test_a_keyword_is_the_name():
    assert names(generator=nn.Linear(1, 1), critic=nn.Linear(1, 1)) == ["generator", "critic"]


def test_an_ordinal_keeps_clear_of_the_keywords_of_the_same_call():
    assert names(nn.Linear(1, 1), model=nn.Linear(1, 1)) == ["model_2", "model"]


def test_an_ordinal_keeps_clear_of_names_that_are_taken():
    assert names(nn.Linear(1, 1), taken={"model": nn.Linear(1, 1)}) == ["model_2"]


def test_an_object_that_has_a_name_keeps_it():
    model = nn.Linear(1, 1)
    assert names(model, taken={"critic": model}) == ["critic"]
    assert names(again=model, taken={"critic": model}) == ["critic"]


def test_a_keyword_in_use_for_another_object_is_refused_by_its_name():
    with pytest.raises(TypeError, match="'ema' was prepared before with another object"):
        names(ema=nn.Linear(1, 1), taken={"ema": nn.Linear(1, 1)})


@pytest.mark.parametrize("thing", [None, 5, [nn.Linear(1, 1)], nn.Linear(1, 1).parameters(), nn.Linear])
def test_what_has_no_state_is_refused_by_its_type_and_by_its_keyword(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        names(thing)
    with pytest.raises(TypeError, match="ema"):
        names(ema=thing)


def test_nothing_to_prepare_is_refused():
    with pytest.raises(TypeError, match=r"run\.prepare\(model, optimizer\)"):
        names()


def test_a_loop_is_called_by_its_ordinal():
    assert loop_name({}, ()) == "0"
    assert loop_name({"0": 1}, {"0"}) == "1"
    assert loop_name({"0": 1, "1": 1}, {"0", "1"}) == "2"


def test_a_loop_that_is_not_complete_goes_on():
    assert loop_name({"0": 1}, ()) == "0"
    assert loop_name({"0": 1, "warm-up": 2}, {"0"}) == "warm-up"


def test_only_the_last_loop_goes_on():
    assert loop_name({"0": 1, "1": 1}, {"1"}) == "2"


@pytest.mark.parametrize(
    ("make", "steps_alone"),
    [
        (lambda o: schedules.StepLR(o, 1), True),
        (lambda o: schedules.SequentialLR(o, [schedules.StepLR(o, 1), schedules.StepLR(o, 1)], [1]), True),
        (lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 1)]), True),
        (schedules.ReduceLROnPlateau, False),
        (lambda o: o, False),
    ],
    ids=["StepLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "optimizer"],
)
def test_a_scheduler_steps_without_being_told_a_metric(make, steps_alone):
    assert is_scheduler(make(optimizer_of(nn.Linear(1, 1)))) is steps_alone
