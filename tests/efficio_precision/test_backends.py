import random

import pytest
import torch

from efficio_precision import Device, Policy, precision_policy, tuned_backends

cudnn = torch.backends.cudnn


@pytest.fixture(autouse=True)
def _as_torch_starts(monkeypatch):
    monkeypatch.setattr(cudnn, "benchmark", False)
    monkeypatch.setattr(cudnn, "deterministic", False)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def gpu(t4):
    return Policy(t4, torch.float16)


def test_benchmark_is_on_inside_and_off_again_outside(gpu):
    with tuned_backends(gpu) as tuned:
        assert cudnn.benchmark
        assert tuned.note == "cudnn.benchmark on"
    assert not cudnn.benchmark


def test_an_exception_puts_everything_back(t4):
    with pytest.raises(ZeroDivisionError), tuned_backends(Policy(t4, torch.float16, tf32=True)):
        1 / 0  # noqa: B018
    assert not cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    "device",
    [Device("cpu", "CPU"), Device("mps", "Apple"), Device("cuda", "AMD Instinct MI250X")],
    ids=["cpu", "mps", "rocm"],
)
def test_other_devices_are_left_alone(device):
    with tuned_backends(Policy(device, torch.float32)) as tuned:
        assert not cudnn.benchmark
        assert tuned.note == "nothing changed"


def test_changing_shapes_switch_benchmark_off_and_say_so(gpu, caplog):
    sizes = random.Random(0).choices([32 * k for k in range(1, 21)], k=40)
    with caplog.at_level("INFO"), tuned_backends(gpu) as tuned:
        for size in sizes:
            tuned.observe((8, 3, size, size))
        assert not cudnn.benchmark
        assert (
            tuned.note
            == "cudnn.benchmark switched off: 5 input shapes so far, and it tries all algorithms for each"
        )
    assert [record.getMessage() for record in caplog.records] == [tuned.note]


def test_a_few_shapes_and_smaller_last_batches_keep_it_on(gpu):
    with tuned_backends(gpu) as tuned:
        for _ in range(5):
            for size in (128, 160, 192, 224):
                tuned.observe(torch.Size((8, 3, size, size)))
                tuned.observe(torch.Size((5, 3, size, size)))
        assert cudnn.benchmark
        tuned.observe(torch.Size((8, 3, 256, 256)))
        assert not cudnn.benchmark


def test_max_shapes_moves_the_limit(gpu):
    with tuned_backends(gpu, max_shapes=1) as tuned:
        tuned.observe((8, 3, 32, 32))
        assert cudnn.benchmark
        tuned.observe((8, 3, 64, 64))
        assert not cudnn.benchmark
    with pytest.raises(ValueError, match="max_shapes=0"), tuned_backends(gpu, max_shapes=0):
        pass


def test_a_benchmark_that_the_user_set_is_never_touched(gpu):
    cudnn.benchmark = True
    with tuned_backends(gpu) as tuned:
        for size in range(20):
            tuned.observe((8, 3, size, size))
        assert cudnn.benchmark
        assert tuned.note.startswith("cudnn.benchmark is on by your own setting: 5 input shapes")
    assert cudnn.benchmark


def test_what_the_user_sets_inside_stays(gpu):
    with tuned_backends(gpu) as tuned:
        for size in range(20):
            tuned.observe((8, 3, size, size))
        cudnn.benchmark = True
    assert cudnn.benchmark
    cudnn.benchmark = False
    with tuned_backends(gpu):
        cudnn.benchmark = False
    assert not cudnn.benchmark


def test_determinism_keeps_benchmark_off(gpu, monkeypatch):
    monkeypatch.setattr(cudnn, "deterministic", True)
    with tuned_backends(gpu):
        assert not cudnn.benchmark
    monkeypatch.setattr(cudnn, "deterministic", False)
    # The real switch imports the compiler, which takes seconds.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with tuned_backends(gpu):
        assert not cudnn.benchmark


def test_benchmark_false_keeps_it_off_and_true_is_taken_on_any_device(gpu, fp32):
    with tuned_backends(gpu, benchmark=False):
        assert not cudnn.benchmark
    with tuned_backends(fp32, benchmark=True):
        assert cudnn.benchmark
    assert not cudnn.benchmark
    cudnn.benchmark = True
    with tuned_backends(fp32, benchmark=True):
        pass
    assert cudnn.benchmark


@pytest.mark.parametrize(
    ("capability", "precision", "tf32"),
    [((8, 0), "fp32", False), ((8, 0), "auto", True), ((7, 5), "fp32", True)],
    ids=["real-fp32", "bf16", "card-without-tf32"],
)
def test_convolutions_round_to_tf32_only_where_that_is_not_ruled_out(capability, precision, tf32):
    policy = precision_policy(Device("cuda", "a card", capability, capability >= (8, 0)), precision)
    assert cudnn.allow_tf32  # torch's default
    with tuned_backends(policy) as tuned:
        assert cudnn.allow_tf32 is tf32
        assert ("no TF32 in convolutions" in tuned.note) is not tf32
    assert cudnn.allow_tf32


def test_a_tf32_in_convolutions_that_is_off_stays_off(monkeypatch):
    monkeypatch.setattr(cudnn, "allow_tf32", False)
    with tuned_backends(precision_policy(Device("cuda", "A100", (8, 0), True), "fp32")) as tuned:
        assert "convolutions" not in tuned.note
    assert not cudnn.allow_tf32


def test_tf32_is_allowed_inside_where_the_policy_says_so(gpu):
    a100 = precision_policy(Device("cuda", "NVIDIA A100", (8, 0), bf16=True))
    with tuned_backends(a100) as tuned:
        assert torch.get_float32_matmul_precision() == "high"
        assert tuned.note == "cudnn.benchmark on, TF32 in float32 matmuls"
    assert torch.get_float32_matmul_precision() == "highest"
    with tuned_backends(gpu):
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_matmul_precision_of_the_user_stays(t4):
    torch.set_float32_matmul_precision("medium")
    with tuned_backends(Policy(t4, torch.float16, tf32=True)):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    with tuned_backends(Policy(t4, torch.float16, tf32=True)):
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch has fp32_precision from version 2.9 on")
def test_a_precision_set_through_the_newer_attributes_is_not_mixed_with(t4):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with tuned_backends(Policy(t4, torch.float16, tf32=True)) as tuned:
            assert matmul.fp32_precision == "tf32"
            assert tuned.note == "cudnn.benchmark on"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
