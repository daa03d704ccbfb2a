import contextlib
import os

import pytest
import torch

from efficio import Run
from efficio._determinism import deterministic_kernels

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get(WORKSPACE),
    )


@pytest.fixture
def as_it_was():
    before = switches()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:4]


def test_off_changes_nothing():
    before = switches()
    with deterministic_kernels(False):
        assert switches() == before
    assert switches() == before


def test_on_sets_every_switch(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    with deterministic_kernels(True):
        assert switches() == (True, False, True, False, ":4096:8")


@pytest.mark.parametrize(
    ("on", "chosen", "then"),
    [(True, None, ":4096:8"), (True, ":16:8", ":16:8"), (False, None, None)],
    ids=str,
)
def test_a_run_chooses_the_workspace_before_anything_is_computed(monkeypatch, tmp_path, on, chosen, then):
    monkeypatch.setenv(WORKSPACE, chosen or "")
    if chosen is None:
        monkeypatch.delenv(WORKSPACE)
    Run(storage=tmp_path, deterministic=on, progress=False)
    assert os.environ.get(WORKSPACE) == then


@pytest.mark.parametrize("workspace", [None, ":16:8"], ids=str)
@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("mode", [(False, False), (True, True), (True, False)], ids=str)
def test_everything_is_put_back_also_after_an_exception(monkeypatch, as_it_was, workspace, benchmark, mode):
    monkeypatch.delenv(WORKSPACE, raising=False)
    if workspace:
        monkeypatch.setenv(WORKSPACE, workspace)
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    torch.backends.cudnn.benchmark = benchmark
    before = switches()
    with contextlib.suppress(ZeroDivisionError), deterministic_kernels(True):
        assert os.environ[WORKSPACE] == (workspace or ":4096:8")
        raise ZeroDivisionError
    assert switches() == before


def test_a_kernel_that_is_not_deterministic_raises():
    with deterministic_kernels(True), pytest.raises(RuntimeError, match="deterministic"):
        torch.ones(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
