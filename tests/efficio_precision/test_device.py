from types import SimpleNamespace

import pytest
import torch

from efficio_precision import Device, detect_device, precision_policy

GIB = 2**30
NO_KERNEL = (
    "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be ..."
)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Let torch.cuda describe one or more cards; a kernel runs on the CPU or fails with the given text."""

    def install(*cards, kernel_error=None, hip=None):
        ones = torch.ones

        def kernel(*size, device=None):
            assert torch.device(device).type == "cuda"
            if kernel_error is not None:
                raise RuntimeError(kernel_error)
            return ones(*size)

        properties = [SimpleNamespace(**card) for card in cards]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: properties[device if isinstance(device, int) else device.index or 0],
        )
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch, "ones", kernel)

    return install


def card(name, major, minor, total_memory=15 * GIB, **more):
    return {"name": name, "major": major, "minor": minor, "total_memory": total_memory, **more}


def test_a_t4_has_no_bf16_though_torch_says_that_it_is_supported(fake_cuda):
    fake_cuda(card("Tesla T4", 7, 5))
    assert torch.cuda.is_bf16_supported()
    assert detect_device() == Device("cuda", "Tesla T4", (7, 5), False, 15 * GIB)
    assert precision_policy().dtype is torch.float16


@pytest.mark.parametrize(
    ("major", "minor", "bf16"), [(7, 0, False), (8, 0, True), (8, 9, True), (9, 0, True), (10, 0, True)]
)
def test_bf16_is_native_from_sm_80_on(fake_cuda, major, minor, bf16):
    fake_cuda(card("some card", major, minor))
    assert detect_device("cuda").bf16 is bf16


def test_a_card_without_kernels_names_its_architecture_the_built_ones_and_the_remedy(fake_cuda):
    fake_cuda(card("Tesla P100-PCIE-16GB", 6, 0), kernel_error=NO_KERNEL)
    with pytest.raises(RuntimeError) as caught:
        detect_device()
    text = str(caught.value)
    for words in (
        "Tesla P100-PCIE-16GB (sm_60)",
        "built for sm_75, sm_80, sm_90",
        "another GPU",
        "sm_60, or 'cpu'",
    ):
        assert words in text
    assert "\n" not in text
    assert "no kernel image" in str(caught.value.__cause__)


def test_another_failure_of_the_first_kernel_is_told_in_one_line(fake_cuda):
    fake_cuda(card("Tesla T4", 7, 5), kernel_error="CUDA error: out of memory\nmore lines")
    with pytest.raises(
        RuntimeError, match=r"^Tesla T4 .* failed \(CUDA error: out of memory\); restart .*'cpu'$"
    ):
        detect_device()


def test_the_index_picks_the_card_and_a_missing_one_is_an_error(fake_cuda):
    fake_cuda(card("Tesla T4", 7, 5), card("NVIDIA L4", 8, 9))
    assert detect_device("cuda").name == "Tesla T4"
    assert detect_device(torch.device("cuda", 1)).name == "NVIDIA L4"
    with pytest.raises(RuntimeError, match=r"'cuda:2' was asked for, but there are 2; the last is 1"):
        detect_device("cuda:2")


@pytest.mark.parametrize(
    ("arch", "bf16"),
    [
        ("gfx90a:sramecc+:xnack-", True),
        ("gfx942", True),
        ("gfx1100", True),
        ("gfx906:sramecc+", False),
        ("gfx1030", False),
    ],
)
def test_rocm_is_told_by_its_architecture_and_has_no_cuda_capability(fake_cuda, arch, bf16):
    fake_cuda(card("AMD Radeon", 9, 0, gcnArchName=arch), hip="6.4")
    assert detect_device() == Device("cuda", "AMD Radeon", None, bf16, 15 * GIB)


def test_rocm_without_kernels_names_its_architecture(fake_cuda):
    fake_cuda(
        card("AMD Radeon", 9, 0, gcnArchName="gfx803"),
        hip="6.4",
        kernel_error="HIP error: invalid device function",
    )
    with pytest.raises(RuntimeError, match=r"AMD Radeon \(gfx803\) cannot run torch"):
        detect_device()


@pytest.mark.skipif(not hasattr(torch, "xpu"), reason=f"torch {torch.__version__} knows no XPU")
@pytest.mark.parametrize("bf16", [True, False])
def test_xpu_bf16_is_what_the_hardware_converts(monkeypatch, bf16):
    ones = torch.ones
    properties = SimpleNamespace(name="Intel Arc", total_memory=8 * GIB, has_bfloat16_conversions=bf16)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
    assert detect_device("xpu") == Device("xpu", "Intel Arc", None, bf16, 8 * GIB)


@pytest.mark.parametrize("macos_14", [True, False])
def test_mps_has_bf16_from_macos_14_on(monkeypatch, macos_14):
    ones = torch.ones
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos_14, raising=False)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB, raising=False)
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
    device = detect_device("mps")
    assert (device.type, device.capability, device.bf16, device.memory_bytes) == (
        "mps",
        None,
        macos_14 and torch.__version__ >= "2.6",
        12 * GIB,
    )


def test_the_cpu_is_found_with_its_memory_where_the_system_tells_it():
    device = detect_device("cpu")
    assert device.type == "cpu"
    assert device.capability is None
    assert device.name
    assert device.memory_bytes is None or device.memory_bytes > 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_an_error_with_the_remedy():
    with pytest.raises(
        RuntimeError, match=r"'cuda' was asked for, but this torch .* sees none; .* choose 'cpu'"
    ):
        detect_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "", "meta", "vulkan"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"choose 'cuda', 'xpu', 'mps' or 'cpu'"):
        detect_device(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_real_card_is_detected():
    device = detect_device()
    assert device.type == "cuda"
    assert device.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    if torch.version.hip is None:
        assert device.capability == torch.cuda.get_device_capability()
