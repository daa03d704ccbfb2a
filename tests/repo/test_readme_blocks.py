"""Runs the python blocks of the READMEs and of docs/.

The blocks of one file run in order, in one namespace, in a folder that is empty at the start. A block that cannot run
here is fenced with ``python no-run`` and the reason behind it. A fence in an HTML comment runs, too: the place for
what a reader need not see.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>```+|~~~+)[ \t]*(?P<info>[^`]*)$")


@dataclass(frozen=True)
class Block:
    first_line: int  # of the code, from 1
    code: tuple[str, ...]
    info: str

    @property
    def is_python(self):
        return re.match(r"(?i)(python|py|python3)\b", self.info) is not None

    @property
    def runs(self):
        return self.info == "python"


def read_blocks(text):
    blocks, inside, first_line, code = [], None, 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if inside is None and fence:
            inside, first_line, code = fence, number + 1, []
        elif inside and fence and not fence["info"].strip() and fence["ticks"].startswith(inside["ticks"]):
            blocks.append(Block(first_line, tuple(code), inside["info"].strip()))
            inside = None
        elif inside:
            code.append(line.removeprefix(inside["indent"]))
    assert inside is None, f"the fence above line {first_line} is never closed"
    return blocks


def script(blocks):
    """The blocks that run, each on the lines that it has in its file, so that a traceback names the right ones."""
    lines = []
    for block in blocks:
        if block.runs:
            lines += [""] * (block.first_line - 1 - len(lines)) + list(block.code)
    return "\n".join(lines) + "\n"


def documents():
    found = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
    found = [path for path in found if path.is_file()]
    return [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in sorted(found)]


def run_document(path, folder):
    file = folder / f"{path.stem}-blocks.py"
    file.write_text(script(read_blocks(path.read_text(encoding="utf-8"))))
    place = folder / "empty"
    place.mkdir()
    environ = {**os.environ, "MPLBACKEND": "Agg", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        cwd=place,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", documents())
def test_the_blocks_run(path, tmp_path):
    if not any(block.runs for block in read_blocks(path.read_text(encoding="utf-8"))):
        pytest.skip("no python block that runs")
    done = run_document(path, tmp_path)
    assert done.returncode == 0, f"line numbers are those of {path.relative_to(ROOT)}\n{done.stdout}"


@pytest.mark.parametrize("path", documents())
def test_a_block_runs_or_says_why_not(path):
    for block in read_blocks(path.read_text(encoding="utf-8")):
        if block.is_python and not block.runs:
            reason = re.fullmatch(r"python no-run:? +(\S.*)", block.info)
            assert reason, (
                f"line {block.first_line - 1}: ```{block.info} is neither python nor python no-run REASON"
            )


def test_there_are_blocks_to_run():
    blocks = [
        block for value in documents() for block in read_blocks(value.values[0].read_text(encoding="utf-8"))
    ]
    assert any(block.runs for block in blocks)


def test_each_package_shows_a_block_that_runs(package):
    blocks = read_blocks((package.folder / "README.md").read_text(encoding="utf-8"))
    assert any(block.runs for block in blocks)


def test_blocks_share_a_namespace_and_keep_their_line_numbers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "\n\n```python\nx = 1\n```\n\n```python no-run needs a card\nx = 5\n```\n- item\n  ```python\n  assert x == 2\n  ```\n"
    )
    done = run_document(page, tmp_path)
    assert done.returncode == 1
    assert "line 12" in done.stdout
    assert "AssertionError" in done.stdout


def test_a_fence_that_is_never_closed_is_an_error():
    with pytest.raises(AssertionError, match="above line 3"):
        read_blocks("text\n```python\nx = 1\n")
