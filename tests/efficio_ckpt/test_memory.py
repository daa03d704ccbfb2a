"""What memory is left, from the accounts that Linux gives."""

import os
import sys

import pytest

from efficio_ckpt import _memory
from efficio_ckpt._memory import available_bytes

MACHINE = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:   1500 kB\n"


@pytest.fixture
def account(tmp_path):
    def write(machine=MACHINE, **container):
        (tmp_path / "meminfo").write_text(machine)
        for name, text in container.items():
            (tmp_path / f"memory.{name}").write_text(text)
        return available_bytes(tmp_path / "meminfo", tmp_path)

    return write


def test_the_machine_alone(account):
    assert account() == 1500 * 1024


def test_a_container_without_a_limit(account):
    assert account(max="max\n", current="5000\n", stat="inactive_file 100\n") == 1500 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "cached", "left"),
    [(100_000, 60_000, 10_000, 50_000), (100_000, 120_000, 0, 0), (9_000_000, 0, 0, 1500 * 1024)],
)
def test_a_container_with_a_limit(account, limit, used, cached, left):
    stat = f"anon 7\ninactive_file {cached}\n"
    assert account(max=f"{limit}\n", current=f"{used}\n", stat=stat) == left


def test_accounts_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_memory, "_of_system", lambda: 77)
    assert available_bytes(tmp_path / "none", tmp_path) == 77


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what Linux accounts for")
def test_this_machine_has_some_and_not_all():
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**20 < available_bytes() < whole
