import pytest

from efficio_report._card import visible_devices


@pytest.mark.parametrize(
    ("text", "count", "devices"),
    [
        (None, 0, ()),
        (None, 2, ("0", "1")),
        ("1,0", 2, ("1", "0")),
        (" 1 , 0 ", 2, ("1", "0")),
        ("0,5,1", 2, ("0",)),
        ("0,-1,1", 2, ("0",)),
        ("", 2, ()),
        ("NoDevFiles", 2, ()),
        ("0,,1", 2, ("0",)),
        ("GPU-1234,MIG-5678", 2, ("GPU-1234", "MIG-5678")),
    ],
    ids=repr,
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(text, count, devices):
    assert visible_devices(text, count) == devices
