import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 8 * 2**20
LOCK_FILES = re.compile(r"(^|/)(.*\.lock|.*-lock\.(json|ya?ml)|pylock.*\.toml)$")

# The expressions do not match themselves, so that this file passes.
MACHINE_PATHS = re.compile(
    r"(?<![\w.~-])/(?:work|home|Users|tmp/w|opt/(?:pypi|wheels))[/-]\w|[A-Z]:\\Users\\"
)
INDEX_HOSTS = re.compile(
    r"pythonhosted\.org|pypi\.(?:org|python\.org|nvidia\.com)|download\.pytorch\.org|--(?:extra-)?index-[u]rl|--find-[l]inks"
)


def git(*arguments):
    # the checkout may belong to another user than the one who tests, as in CI as root
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


@pytest.fixture(scope="module")
def tracked():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files are tracked is unknown")
    names = [name for name in git("ls-files", "-z").split("\0") if name]
    assert names
    # a file may be deleted in the working tree and not yet in the index
    return [name for name in names if (ROOT / name).is_file()]


def lines_with(pattern, names):
    for name in names:
        data = (ROOT / name).read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode().splitlines(), start=1):
            if pattern.search(line):
                yield f"{name}:{number}: {line.strip()[:120]}"


def test_no_tracked_file_names_a_path_of_a_machine(tracked):
    assert list(lines_with(MACHINE_PATHS, tracked)) == []


def test_no_tracked_file_names_the_folder_of_this_checkout(tracked):
    if len(ROOT.parts) < 3:
        pytest.skip("the checkout lies directly below the root folder")
    assert list(lines_with(re.compile(re.escape(str(ROOT))), tracked)) == []


def test_no_tracked_file_names_the_host_of_a_package_index(tracked):
    assert list(lines_with(INDEX_HOSTS, tracked)) == []


def test_no_lock_file_is_tracked(tracked):
    assert [name for name in tracked if LOCK_FILES.search(name)] == []


def test_no_tracked_file_is_larger_than_8_mib(tracked):
    sizes = {name: (ROOT / name).stat().st_size for name in tracked}
    assert {name: size for name, size in sizes.items() if size > LARGEST_BYTES} == {}


@pytest.mark.usefixtures("tracked")
def test_no_ignored_file_is_tracked():
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == ""


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        pytest.param(MACHINE_PATHS, "see " + "/work" + "/main/x", id="checkout"),
        pytest.param(MACHINE_PATHS, "'/home" + "/someone'", id="home"),
        pytest.param(INDEX_HOSTS, "https://" + "files.python" + "hosted.org/x", id="host"),
        pytest.param(INDEX_HOSTS, "pip install --index" + "-url x", id="option"),
        pytest.param(LOCK_FILES, "packages/efficio/uv.lock", id="uv"),
        pytest.param(LOCK_FILES, "package-lock.json", id="npm"),
    ],
)
def test_what_must_not_be_there_is_seen(pattern, text):
    assert pattern.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "examples" + "/work" + "/x",
        "https://x.org" + "/home" + "/y",
        "the clock",
        "block.py",
        "/content/drive",
    ],
)
def test_what_may_be_there_is_let_pass(text):
    assert not any(pattern.search(text) for pattern in (MACHINE_PATHS, INDEX_HOSTS, LOCK_FILES))
