import collections
import dataclasses
import pickle
import typing

import pytest
import torch

from efficio_data._inputs import on_inputs


def double(images):
    return images * 2


X, Y = torch.tensor([1.0, 2.0]), torch.tensor([0, 1])


class Pair(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    label: torch.Tensor
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "made", self.made + 1)


@pytest.mark.parametrize(
    "batch",
    [(X, Y), [X, Y], Pair(X, Y), (X, Y, "name", None)],
    ids=["tuple", "list", "namedtuple", "longer"],
)
def test_the_first_of_a_sequence_is_transformed_and_its_type_kept(batch):
    result = on_inputs(double)(batch)
    assert type(result) is type(batch)
    assert torch.equal(result[0], X * 2)
    assert all(new is old for new, old in zip(result[1:], batch[1:], strict=True))
    assert batch[0] is X


@pytest.mark.parametrize(
    "kind", [dict, collections.OrderedDict, collections.UserDict], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("key", ["image", "images", "pixel_values", "x", "input"])
def test_the_named_input_of_a_mapping_is_transformed_and_its_type_kept(kind, key):
    batch = kind({"label": Y, key: X, "path": "a.png"})
    result = on_inputs(double)(batch)
    assert type(result) is kind
    assert list(result) == list(batch)
    assert torch.equal(result[key], X * 2)
    assert result["label"] is Y
    assert batch[key] is X


def test_a_defaultdict_keeps_its_default():
    batch = collections.defaultdict(list, x=X)
    assert on_inputs(double)(batch)["unknown"] == []


def test_keys_name_any_inputs_one_or_several():
    batch = {"left": X, "right": X, "x": X}
    one, two = on_inputs(double, "left")(batch), on_inputs(double, keys=["left", "right"])(batch)
    assert [one[key] is X for key in batch] == [False, True, True]
    assert [two[key] is X for key in batch] == [False, False, True]


def test_a_dataclass_keeps_its_other_fields_as_they_are():
    batch = Frozen(X, Y)
    object.__setattr__(batch, "made", 7)
    result = on_inputs(double)(batch)
    assert torch.equal(result.image, X * 2)
    assert (result.label is Y, result.made, type(result)) == (True, 7, Frozen)
    assert batch.image is X


def test_a_namedtuple_goes_by_its_names_when_keys_are_given():
    result = on_inputs(double, "y")(Pair(X, Y))
    assert result.x is X
    assert torch.equal(result.y, Y * 2)


def test_a_bare_tensor_is_transformed_itself():
    assert torch.equal(on_inputs(double)(X), X * 2)


def test_the_result_can_be_pickled_and_shows_its_transform():
    made = on_inputs(double, "x")
    assert pickle.loads(pickle.dumps(made)) == made
    assert "double" in repr(made)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        pytest.param(lambda: on_inputs(None), TypeError, "transform=None", id="no transform"),
        pytest.param(lambda: on_inputs(dict), TypeError, "no callable object", id="a class"),
        pytest.param(lambda: on_inputs(double, []), ValueError, r"keys=\[\] names no input", id="no keys"),
        pytest.param(lambda: on_inputs(double, [0]), ValueError, r"keys=\[0\]", id="a number as key"),
        pytest.param(
            lambda: on_inputs(double)({"img": X, "y": Y}),
            ValueError,
            r"has \['img', 'y'\]",
            id="no usual name",
        ),
        pytest.param(
            lambda: on_inputs(double, ["x", "z"])({"x": X}),
            ValueError,
            r"has \['x'\] and not \['z'\]",
            id="one of two",
        ),
        pytest.param(
            lambda: on_inputs(double, "x")((X, Y)),
            ValueError,
            "keys=.*the batch is a tuple",
            id="keys for a tuple",
        ),
        pytest.param(lambda: on_inputs(double)(()), ValueError, "empty tuple", id="empty"),
        pytest.param(lambda: on_inputs(double)("text"), TypeError, "batch is a str", id="text"),
    ],
)
def test_what_has_no_inputs_is_refused_in_one_line(call, error, says):
    with pytest.raises(error, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_transform_that_fails_leaves_the_batch_alone():
    batch = {"image": X, "x": "text"}
    with pytest.raises(TypeError):
        on_inputs(lambda images: images - 1)(batch)
    assert batch == {"image": X, "x": "text"}
