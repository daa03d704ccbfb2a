"""Random generators go on where they stood, whatever happened to their states on the way."""

import logging
import random

import numpy as np
import pytest
import torch

from efficio_ckpt import CheckpointError, load_state, rng_state, save_state, set_rng_state


def draw():
    return (
        torch.rand(5).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
    )


def test_all_generators_go_on_from_a_stored_state(tmp_path):
    random.gauss(0, 1)
    np.random.standard_normal()
    save_state(tmp_path, {"rng": rng_state()}, step=0)
    expected = draw()
    draw()
    set_rng_state(load_state(tmp_path)["rng"])
    assert draw() == expected


def test_taking_the_states_moves_none():
    first = rng_state()
    second = rng_state()
    assert torch.equal(first["torch"], second["torch"])
    assert first["random"]["gauss"] == second["random"]["gauss"]


def test_a_torch_state_that_was_cast_is_cast_back():
    state = rng_state()
    expected = torch.rand(5)
    state["torch"] = state["torch"].to(torch.int64)
    set_rng_state(state)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize(
    "bad", [torch.zeros(100, dtype=torch.uint8), "x", torch.rand(5056)], ids=["short", "text", "float"]
)
def test_a_torch_state_that_is_none_is_an_error_that_names_it_and_moves_nothing(bad):
    state = rng_state()
    state["torch"] = bad
    before = rng_state()
    with pytest.raises(CheckpointError, match="RNG state 'torch'"):
        set_rng_state(state)
    assert torch.equal(rng_state()["torch"], before["torch"])
    assert np.array_equal(rng_state()["numpy"]["state"]["key"], before["numpy"]["state"]["key"])


@pytest.mark.parametrize("bad", [None, {}, {"bit_generator": "MT19937", "state": 3}, "x"], ids=repr)
def test_a_damaged_numpy_state_is_told_and_the_others_are_restored(bad, caplog):
    state = rng_state()
    expected = torch.rand(3), random.random()
    state["numpy"] = bad
    with caplog.at_level(logging.WARNING):
        set_rng_state(state)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert [record.message for record in caplog.records if "'numpy'" in record.message]


def test_a_damaged_python_state_is_told_and_the_others_are_restored(caplog):
    state = rng_state()
    expected = np.random.rand(3)
    state["random"]["words"] = state["random"]["words"][:5]
    with caplog.at_level(logging.WARNING):
        set_rng_state(state)
    assert np.array_equal(np.random.rand(3), expected)
    assert "'random'" in caplog.text


@pytest.mark.parametrize(
    ("devices", "calls", "told"), [(1, [0], ["2", "1"]), (0, [], ["GPU RNG not restored"])]
)
def test_states_of_more_gpus_than_there_are(monkeypatch, caplog, devices, calls, told):
    state = rng_state()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, index: seen.append(index))
    with caplog.at_level(logging.DEBUG):
        set_rng_state(state)
    assert seen == calls
    (record,) = caplog.records
    assert all(text in record.message for text in told)


def test_what_is_no_state_is_an_error():
    with pytest.raises(CheckpointError, match="no state of the random generators"):
        set_rng_state([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators_go_on():
    torch.rand(1, device="cuda")
    state = rng_state()
    expected = torch.rand(5, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
