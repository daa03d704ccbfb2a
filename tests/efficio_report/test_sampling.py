import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from efficio_report import GPUSample, GPUSummary, collect_report, sample_gpu

GB = 10**9
WAIT_SECONDS = 30.0
QUERIES = ("UtilizationRates", "MemoryInfo", "PowerUsage", "ClockInfo", "Temperature")


class NVMLError(Exception):
    pass


class FakeNVML:
    """A driver with cards, in place of `pynvml`; `refused` names the calls that raise."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *uuids, refused=(), enough=3):
        self.uuids = uuids
        self.refused = set(refused)
        self.opened = 0
        self.reads = []
        self.enough = enough
        self.read_enough = threading.Event()
        self.threads = set()

    def _answer(self, name, value):
        if name in self.refused:
            raise NVMLError(name)
        return value

    def nvmlInit(self):
        self._answer("Init", None)
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        return self._answer("Count", len(self.uuids))

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._answer("HandleByIndex", f"card {index}")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._answer("HandleByUUID", f"slice {uuid}")

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[int(handle.split()[1])]

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.threads.add(threading.current_thread())
        self.reads.append(handle)
        if len(self.reads) >= self.enough:
            self.read_enough.set()
        return self._answer("UtilizationRates", SimpleNamespace(gpu=50, memory=10))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._answer("MemoryInfo", SimpleNamespace(used=4 * GB, free=12 * GB, total=16 * GB))

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("PowerUsage", 61_500)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert kind == self.NVML_CLOCK_SM
        return self._answer("ClockInfo", 1590)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer("Temperature", 71)


class FakeTorch(SimpleNamespace):
    """A torch whose CUDA runs, with the memory and the UUIDs that are given."""

    def __init__(self, *uuids, initialized=True, memory=(6 * GB, 16 * GB)):
        self.initialized = initialized

        def mem_get_info(device):
            if memory is None:
                raise RuntimeError("CUDA error")
            return memory

        super().__init__(
            cuda=SimpleNamespace(
                is_initialized=lambda: self.initialized,
                device_count=lambda: len(uuids),
                get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
                mem_get_info=mem_get_info,
            )
        )


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def samples_of(nvml, *, device=0, environ=None):
    samples = []
    with sample_gpu(samples, interval=1e-4, nvml=nvml, device=device, environ=environ or {}):
        assert nvml.read_enough.wait(WAIT_SECONDS)
    return samples


def sampler_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("efficio")]


def test_samples_hold_all_figures_in_their_units():
    nvml = FakeNVML("GPU-a")
    samples = samples_of(nvml)
    assert len(samples) >= nvml.enough
    first = samples[0]
    assert first.seconds >= 0.0
    assert first == GPUSample(first.seconds, 0.5, 4 * GB, 16 * GB, 61.5, 1590, 71)


def test_the_thread_ends_and_nvml_is_closed_with_the_body():
    nvml = FakeNVML("GPU-a")
    samples_of(nvml)
    (thread,) = nvml.threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert not thread.is_alive()
    assert nvml.opened == 0
    assert sampler_threads() == []


def test_the_thread_ends_when_the_body_raises():
    nvml = FakeNVML("GPU-a")

    def train():
        with sample_gpu([], nvml=nvml, environ={}):
            assert len(sampler_threads()) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert sampler_threads() == []
    assert nvml.opened == 0


def test_the_first_sample_is_taken_at_once():
    samples = []
    nvml = FakeNVML("GPU-a", enough=1)
    with sample_gpu(samples, interval=3600.0, nvml=nvml, environ={}):
        assert nvml.read_enough.wait(WAIT_SECONDS)
    assert len(samples) == 1


def test_the_times_of_the_samples_come_from_the_given_clock():
    ticks = iter([100.0, 101.0, 99.0, *range(102, 10_000)])
    nvml = FakeNVML("GPU-a")
    samples = []
    with sample_gpu(samples, interval=1e-4, nvml=nvml, environ={}, clock=lambda: next(ticks)):
        assert nvml.read_enough.wait(WAIT_SECONDS)
    assert [sample.seconds for sample in samples[:3]] == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("refused", QUERIES)
def test_a_query_that_is_refused_costs_only_its_own_figure(refused):
    sample = samples_of(FakeNVML("GPU-a", refused=[refused]))[0]
    figures = {
        "UtilizationRates": [sample.utilization],
        "MemoryInfo": [sample.memory_used_bytes, sample.memory_total_bytes],
        "PowerUsage": [sample.power_watts],
        "ClockInfo": [sample.clock_mhz],
        "Temperature": [sample.temperature_celsius],
    }
    assert all(figure is None for figure in figures.pop(refused))
    assert all(figure is not None for values in figures.values() for figure in values)


def test_on_a_slice_without_permissions_the_memory_comes_from_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("a"))
    sample = samples_of(FakeNVML("GPU-a", refused=["UtilizationRates", "MemoryInfo"]))[0]
    assert sample.utilization is None
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (10 * GB, 16 * GB)
    assert sample.power_watts == 61.5


@pytest.mark.parametrize(
    "torch", [None, FakeTorch(initialized=False), FakeTorch(memory=None), SimpleNamespace()], ids=range(4)
)
def test_torch_is_not_asked_unless_its_cuda_runs_already(monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    sample = samples_of(FakeNVML("GPU-a", refused=["MemoryInfo"]))[0]
    assert sample.memory_used_bytes is None
    assert sample.memory_total_bytes is None


def test_without_nvml_torch_alone_gives_the_memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("a"))
    samples = []
    nvml = FakeNVML("GPU-a", refused=["Init"])
    with sample_gpu(samples, interval=1e-4, nvml=nvml, environ={}):
        while not samples:
            assert sampler_threads()
    assert samples[0].memory_used_bytes == 10 * GB
    assert samples[0].utilization is None
    assert nvml.reads == []


@pytest.mark.parametrize("refused", ["Init", "Count", "HandleByIndex"])
def test_without_a_driver_or_a_card_there_are_no_samples_and_no_thread(refused):
    nvml = FakeNVML("GPU-a", refused=[refused])
    samples = []
    with sample_gpu(samples, nvml=nvml, environ={}):
        assert sampler_threads() == []
    assert samples == []
    assert nvml.opened == 0


def test_without_the_library_there_are_no_samples_and_no_thread(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    samples = []
    with sample_gpu(samples):
        assert sampler_threads() == []
    assert samples == []


def test_the_real_library_on_this_machine_never_raises():
    samples = []
    with sample_gpu(samples, interval=0.01):
        pass
    assert all(isinstance(sample, GPUSample) for sample in samples)
    assert sampler_threads() == []


@pytest.mark.parametrize(
    ("visible", "device", "card"),
    [
        (None, 0, "card 0"),
        (None, 1, "card 1"),
        ("1", 0, "card 1"),
        ("2,0", 1, "card 0"),
        ("GPU-bb", 0, "card 1"),
        ("0,GPU-c", 1, "card 2"),
        ("MIG-55", 0, "slice MIG-55"),
    ],
    ids=repr,
)
def test_the_device_is_counted_within_cuda_visible_devices(visible, device, card):
    nvml = FakeNVML("GPU-aa", "GPU-bb", "GPU-cc")
    samples_of(nvml, device=device, environ={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert set(nvml.reads) == {card}


@pytest.mark.parametrize(("visible", "device"), [("", 0), ("-1", 0), ("0", 1), ("7", 0), ("GPU-x", 0)])
def test_a_device_that_cuda_does_not_show_is_not_sampled(visible, device):
    samples = []
    nvml = FakeNVML("GPU-aa", "GPU-bb")
    with sample_gpu(samples, nvml=nvml, device=device, environ={"CUDA_VISIBLE_DEVICES": visible}):
        assert sampler_threads() == []
    assert samples == []


def test_the_variables_of_the_process_are_the_default(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = FakeNVML("GPU-aa", "GPU-bb")
    with sample_gpu([], interval=1e-4, nvml=nvml):
        assert nvml.read_enough.wait(WAIT_SECONDS)
    assert set(nvml.reads) == {"card 1"}


def test_a_running_cuda_says_which_card_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("bb", "aa"))
    nvml = FakeNVML("GPU-aa", "GPU-bb")
    samples_of(nvml)
    assert set(nvml.reads) == {"card 1"}


def test_a_cuda_that_starts_during_the_run_corrects_the_card(monkeypatch):
    torch = FakeTorch("bb", initialized=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    nvml = FakeNVML("GPU-aa", "GPU-bb", enough=1)
    with sample_gpu([], interval=1e-4, nvml=nvml, environ={}):
        assert nvml.read_enough.wait(WAIT_SECONDS)
        nvml.read_enough.clear()
        torch.initialized = True
        nvml.enough = len(nvml.reads) + 3
        assert nvml.read_enough.wait(WAIT_SECONDS)
    assert nvml.reads[0] == "card 0"
    assert nvml.reads[-1] == "card 1"


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf")], ids=repr)
def test_an_interval_that_is_no_time_is_refused(interval):
    with pytest.raises(ValueError, match=r"^interval=.* is not a time between samples"):
        with sample_gpu([], interval=interval):
            pytest.fail("entered")


def test_a_negative_device_is_refused():
    with pytest.raises(ValueError, match="device=-1 is not the index of a GPU"):
        with sample_gpu([], device=-1):
            pytest.fail("entered")


def test_means_and_peaks_are_over_the_samples_that_have_the_figure():
    samples = [
        GPUSample(0.0, 0.2, 1 * GB, 16 * GB, 50.0, 1000, 60),
        GPUSample(1.0, None, None, None, None, None, None),
        GPUSample(2.0, 0.6, 3 * GB, 16 * GB, 70.0, 1500, 65),
    ]
    assert collect_report({}, samples, steps=0).gpu == GPUSummary(
        samples=3,
        utilization_mean=pytest.approx(0.4),
        utilization_max=0.6,
        memory_peak_bytes=3 * GB,
        memory_total_bytes=16 * GB,
        power_mean_watts=60.0,
        power_max_watts=70.0,
        clock_mean_mhz=1250.0,
        temperature_max_celsius=65,
    )


def test_samples_without_figures_give_none_and_no_samples_no_summary():
    assert collect_report({}, [GPUSample(0.0)], steps=0).gpu == GPUSummary(samples=1)
    assert collect_report({}, steps=0).gpu is None


def test_importing_imports_neither_torch_nor_nvml_and_starts_nothing():
    program = (
        "import sys, threading, efficio_report\n"
        "print(sorted({'torch', 'pynvml', 'numpy'} & set(sys.modules)), threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "[] 1\n"


def test_identities_as_bytes_are_understood(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("aa"))
    nvml = FakeNVML(b"GPU-bb", b"GPU-aa")
    samples_of(nvml)
    assert set(nvml.reads) == {"card 1"}


@pytest.mark.gpu
def test_a_real_gpu_is_sampled_with_its_memory(monkeypatch):
    monkeypatch.undo()
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    held = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    samples = []
    with sample_gpu(samples, interval=0.02):
        while len(samples) < 3:
            torch.cuda.synchronize()
    assert samples[-1].memory_used_bytes >= held.numel()
    assert samples[-1].memory_total_bytes == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.05)
