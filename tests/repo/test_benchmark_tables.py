"""The tables in the pages are what the newest results say."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(ROOT / "benchmarks"))  # where the script itself finds _results
    try:
        spec = importlib.util.spec_from_file_location("benchmark_table", ROOT / "benchmarks" / "table.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
        sys.modules.pop("_results", None)
    return module


def result(**changes):
    took = {"bare": 200.0, "fabric": 260.0, "efficio": 240.0, "keyed": 225.0}
    repeats = [{name: {"p10": us + noise} for name, us in took.items()} for noise in (0.0, 3.0, 50.0)]
    settings = {"loops": list(took), "model": "MLP", "batch_size": 16, "optimizer": "SGD"}
    settings |= {"threads": 1, "steps": 40, "warmup": 5, "repeats": 3}
    whole = {
        "date": "2030-01-02T03:04:05Z",
        "versions": {"torch": "2", "lightning": "9.9"},
        "hardware": {"cpu": "C"},
    }
    return {"repeats": repeats, "settings": settings, **whole, **changes}


def test_every_page_shows_the_newest_results(table):
    for page in table.pages():
        text = page.read_text(encoding="utf-8")
        assert table.with_tables(text) == text, f"{page.name} is out of date; run: python benchmarks/table.py"


def test_every_benchmark_has_a_script_and_every_result_a_benchmark(table):
    scripts = {p.stem for p in (ROOT / "benchmarks").glob("[!_]*.py")} - {"table"}
    assert set(table.TABLES) <= scripts
    assert {p.parent.name for p in (ROOT / "benchmarks" / "results").glob("*/*.json")} <= scripts


def test_every_result_says_what_was_measured_where_and_holds_all_repeats():
    for path in (ROOT / "benchmarks" / "results").glob("*/*.json"):
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert {"benchmark", "date", "commit", "settings", "versions", "hardware", "repeats"} <= set(
            stored
        ), path.name
        assert stored["benchmark"] == path.parent.name
        assert len(stored["repeats"]) == stored["settings"]["repeats"]


def test_differences_are_paired_within_a_repeat(table):
    shown = table.loop_overhead_table(result())
    assert (
        "| Lightning Fabric 9.9 | 278 us | +60.0 us (+60.0 to +60.0) |" in shown
    )  # the noise of a repeat is gone
    assert "| of which keyed randomness | | +25.0 us (+25.0 to +25.0) |" in shown
    assert "| of which all the rest | | +15.0 us (+15.0 to +15.0) |" in shown
    assert "2030-01-02" in shown


def test_an_interval_is_wider_where_repeats_differ_and_the_same_at_each_call(table):
    mean, low, high = table.mean_and_interval([1.0, 2.0, 3.0, 10.0])
    assert low < mean == 4.0 < high
    assert (mean, low, high) == table.mean_and_interval([1.0, 2.0, 3.0, 10.0])


def test_a_number_changed_by_hand_is_found(table):
    page = "a\n<!-- bench:loop_overhead -->\n<!-- /bench:loop_overhead -->\nb\n"
    right = table.with_tables(page, lambda name: result())
    assert right.startswith("a\n<!-- bench:loop_overhead -->\n| loop |")
    assert right.endswith("<!-- /bench:loop_overhead -->\nb\n")
    assert table.with_tables(right, lambda name: result()) == right
    assert table.with_tables(right.replace("+15.0", "+14.0"), lambda name: result()) == right
    assert "+15.0" in right


@pytest.mark.parametrize(
    ("page", "word"),
    [
        pytest.param("<!-- bench:loop_overhead -->\n| 1 |\n", "no partner", id="not-closed"),
        pytest.param("<!-- /bench:loop_overhead -->", "no partner", id="not-opened"),
        pytest.param(
            "<!-- bench:loop-overhead -->\n<!-- /bench:loop-overhead -->", "no partner", id="not-a-name"
        ),
        pytest.param("<!-- bench:other -->\n<!-- /bench:other -->", "names no table", id="unknown"),
    ],
)
def test_a_mark_that_cannot_be_filled_is_an_error_not_a_page_without_a_table(table, page, word):
    with pytest.raises(ValueError, match=word):
        table.with_tables(page, lambda name: result())


def test_a_benchmark_without_a_result_is_an_error(table, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run benchmarks/loop_overhead\.py"):
        table.newest_result("loop_overhead", tmp_path)


def test_the_newest_result_is_the_one_written_last_on_any_machine(table, tmp_path):
    (tmp_path / "loop_overhead").mkdir()
    for name, date in [("a-2030-01-02", "2030-01-02T00:00:00Z"), ("b-2030-01-01", "2030-01-01T00:00:00Z")]:
        (tmp_path / "loop_overhead" / f"{name}.json").write_text(json.dumps({"date": date}))
    assert table.newest_result("loop_overhead", tmp_path)["date"] == "2030-01-02T00:00:00Z"
