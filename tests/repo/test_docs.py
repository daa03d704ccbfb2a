import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?P<target>[^)\s#]+)(?:#[^)]*)?\)")


def broken_links(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = [match["target"] for match in LINK.finditer(prose)]
    return [t for t in targets if not re.match(r"[a-z]+:", t) and not (page.parent / t).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[here](page.md) [web](https://x.org/a) [gone](other.md#part)")
    assert broken_links(page) == ["other.md"]


def test_each_decision_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = [path.name for path in folder.glob("*.md") if path.name != "README.md"]
    assert pages
    assert [name for name in pages if f"({name})" not in index] == []
