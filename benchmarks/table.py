"""Write the benchmarks' tables into the pages that ask for them, from the newest result of each.

A page asks with a pair of marks, and everything between them is replaced:

    <!-- bench:loop_overhead -->
    <!-- /bench:loop_overhead -->

    python benchmarks/table.py            rewrites README.md, docs/ and the packages' READMEs
    python benchmarks/table.py --check    says which are out of date, and fails if any is
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _results import ROOT, mean_and_interval, newest_result

MARK = re.compile(r"<!-- bench:(\w+) -->\n(.*?)<!-- /bench:\1 -->", re.DOTALL)
ANY_MARK = re.compile(r"<!-- /?bench:[^>]*-->")

NAMES = {
    "bare": "written by hand",
    "ignite": "Ignite `Engine`",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "lightning": "Lightning `Trainer`",
    "transformers": "transformers `Trainer`",
    "efficio": "efficio `Run`",
}


def loop_overhead_table(result: dict[str, Any]) -> str:
    """The table of `loop_overhead`: CPU time a step, and paired differences with their intervals."""
    repeats, settings = result["repeats"], result["settings"]
    lines = ["| loop | CPU time a step | over the loop by hand |", "|---|---:|---:|"]
    p10 = {name: np.array([row[name]["p10"] for row in repeats]) for name in settings["loops"]}
    # Beside each library the loop by hand ran in the same process.
    bare = {name: np.array([row[name].get("bare", row["bare"]["p10"]) for row in repeats]) for name in p10}
    for name in NAMES:
        if name in p10:
            added = "" if name == "bare" else _interval(p10[name] - bare[name])
            lines.append(f"| {_titled(name, result)} | {p10[name].mean():.0f} us | {added} |")
    if "keyed" in p10:
        lines.append(f"| of which keyed randomness | | {_interval(p10['keyed'] - bare['keyed'])} |")
        lines.append(f"| of which all the rest | | {_interval(p10['efficio'] - p10['keyed'])} |")
    if (step := settings.get("resnet18_step_us")) and "efficio" in p10:
        part = (p10["efficio"] - bare["efficio"]).mean() / step
        lines += [
            "",
            f"Of a step of ResNet-18 on 64 images of 32 x 32 on this CPU, efficio's part is {part:.3%}.",
        ]
    return "\n".join([*lines, "", _setting(result)])


def _titled(name: str, result: dict[str, Any]) -> str:
    distribution = {"fabric": "lightning"}.get(name, name)
    version = result.get("versions", {}).get(distribution)
    return NAMES[name] if version is None else f"{NAMES[name]} {version}"


def _interval(values: np.ndarray) -> str:
    mean, low, high = mean_and_interval(values)
    return f"{mean:+.1f} us ({low:+.1f} to {high:+.1f})"


def _setting(result: dict[str, Any]) -> str:
    settings = result["settings"]
    text = (
        f"{settings['model']}, batches of {settings['batch_size']} that are ready, {settings['optimizer']}, "
        f"{settings['threads']} thread. The 10th percentile of {settings['steps'] - settings['warmup']} steps, mean of "
        f"{settings['repeats']} repeats, each of the loop by hand and of another one, in a process for each library; in brackets the bootstrap interval of 95 %."
    )
    if "hardware" in result:
        text += f" {result['hardware']['cpu']}, torch {result['versions']['torch']}, {result['date'][:10]}."
    return text


SAVES = {
    "raw": "the bytes alone, written and flushed",
    "safetensors": "safetensors `save_file`, not flushed",
    "torch_save": "`torch.save`, not flushed",
    "accelerate": "Accelerate `save_state`, not flushed",
    "dcp_save": "DCP `save`",
    "efficio_save": "efficio `save_state`",
    "lightning": "Lightning `AsyncCheckpointIO`",
    "torchsnapshot": "torchsnapshot `async_take`",
    "dcp_async": "DCP `async_save`, `DefaultStager`",
    "dcp_async_aside": "the same, staged in a thread and awaited before the step [1]",
    "efficio": "efficio `background_saver`",
}
MODELS = {"resnet18": "ResNet-18, SGD with momentum", "transformer": "Transformer, AdamW"}


def checkpoints_table(result: dict[str, Any]) -> str:
    """The table of `checkpoints`: medians over all saves but the first of each process, and their range."""
    lines = []
    for model in result["settings"]["models"]:
        rows = [row[model] for row in result["repeats"]]
        size = next(iter(rows[0].values()))["state_bytes"] / 1e6
        lines += [f"**{MODELS[model]}, {size:.0f} MB**", ""]
        lines += [
            "| | loop blocked | the step meanwhile | until durable | memory | load |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        alone = np.median(_pooled(rows, "none", "plain")) if "none" in rows[0] else None
        for method, name in SAVES.items():
            if method in rows[0]:
                memory = max(_pooled(rows, method, "memory", first=True)) / (size * 1e6)
                step = np.median(_pooled(rows, method, "during")) / alone if alone else float("nan")
                lines.append(
                    f"| {name} | {_milliseconds(_pooled(rows, method, 'blocked'))} | {step:.2f} x | "
                    f"{_milliseconds(_pooled(rows, method, 'total'))} | {memory:.2f} x | "
                    f"{_milliseconds(_pooled(rows, method, 'load'))} |"
                )
        lines.append("")
    return "\n".join([*lines, _checkpoint_setting(result)])


def _pooled(rows: list[dict[str, Any]], method: str, figure: str, *, first: bool = False) -> list[float]:
    """A figure of all repeats; the first of each process, which makes buffers and fills caches, is left out unless wanted."""
    return [value for row in rows for value in row[method][figure][0 if first else 1 :]]


def _milliseconds(values: list[float]) -> str:
    return f"{np.median(values) * 1e3:.1f} ms ({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f})"


def _checkpoint_setting(result: dict[str, Any]) -> str:
    settings = result["settings"]
    text = (
        f"Median and range of {settings['saves'] - 1} saves in each of {settings['repeats']} processes, one save every "
        f"{2 * settings['gap']} steps of a real training, {settings['threads']} threads, {settings['file_system']}. Blocked is the "
        "call and the wait before the next optimizer step; the step meanwhile is the first one after the call, over one without a "
        "save; memory is the peak over what the process had, in sizes of the state. "
        "[1] It stores buffers that the forward pass moves, such as BatchNorm's, of a later moment than the weights."
    )
    if "hardware" in result:
        text += f" {result['hardware']['cpu']}, torch {result['versions']['torch']}, {result['date'][:10]}."
    return text


def save_profile_table(result: dict[str, Any]) -> str:
    """The table of `save_profile`: medians, in the order in which they happen."""
    (row,) = result["repeats"]
    lines = ["| | " + " | ".join(MODELS[model] for model in row) + " |", "|---|" + "---:|" * len(row)]
    first = next(iter(row.values()))
    for part in sorted(first["call"], key=lambda part: part == "the whole call"):
        figures = [f"{row[model]['call'][part] * 1e3:.2f} ms" for model in row]
        lines.append(f"| {part} | " + " | ".join(figures) + " |")
    for part in first["durable"]:
        if part != "bytes":
            figures = [f"{row[model]['durable'][part] * 1e3:.0f} ms" for model in row]
            lines.append(
                f"| {part}, of {'these bytes' if part in _FLOORS else 'the state'} | "
                + " | ".join(figures)
                + " |"
            )
    return "\n".join(lines)


WAYS = {
    "plain": ("epoch and states in a file", None),
    "fabric": ("Fabric `save` and `load`", "lightning"),
    "fabric_skip": ("Fabric, batches dropped by hand", "lightning"),
    "fabric_stateful": ("Fabric with torchdata's StatefulDataLoader", "lightning"),
    "lightning": ("Lightning `Trainer`, `ckpt_path`", "lightning"),
    "lightning_stateful": ("Lightning with StatefulDataLoader", "lightning"),
    "accelerate": ("Accelerate, `skip_first_batches`", "accelerate"),
    "accelerate_seedable": ("Accelerate, `use_seedable_sampler`", "accelerate"),
    "transformers": ("transformers `Trainer`, `resume_from_checkpoint`", "transformers"),
    "ignite": ("Ignite `Engine` and `Checkpoint`", "pytorch-ignite"),
    "ignite_deterministic": ("Ignite `DeterministicEngine`", "pytorch-ignite"),
    "keras": ("Keras `BackupAndRestore` (on torch)", "keras"),
    "stateful_by_hand": ("StatefulDataLoader, generators stored by hand", "torchdata"),
    "grain": ("Grain `DataLoader`, noise from NumPy's global generator", "grain"),
    "efficio": ("**efficio `Run`**", "efficio"),
}


def resume_exactness_table(result: dict[str, Any]) -> str:
    """The table of `resume_exactness`: a row for each way, a column for each case."""
    (rows,) = result["repeats"]
    columns = result["settings"]["columns"]
    titles = [f"{column[0]}, {'no' if column[1:] == '0' else column[1:]} workers" for column in columns]
    lines = [
        f"| | {' | '.join(titles)} | seen twice / never | steps |",
        "|---|" + "---|" * len(columns) + "---|---:|",
    ]
    words = {"exact": "**exact**", "order": "order only", "no": "no", "error": "error"}
    for way, row in rows.items():
        name, distribution = WAYS[way]
        version = result.get("versions", {}).get(distribution) if distribution else None
        cells = [words[row[column]["verdict"]] for column in columns]
        good = [row[column] for column in columns if row[column]["verdict"] != "error"]
        twice = max((cell["twice"] for cell in good), default=0)
        never = max((cell["never"] for cell in good), default=0)
        steps = sorted({cell["steps"] for cell in good})
        lines.append(
            f"| {name}{f' {version}' if version else ''} | {' | '.join(cells)} | {twice} / {never} | "
            f"{', '.join(map(str, steps))} |"
        )
    return "\n".join([*lines, "", _exactness_setting(result)])


def _exactness_setting(result: dict[str, Any]) -> str:
    settings = result["settings"]
    text = (
        f"{settings['samples']} samples, batches of {settings['batch']}, {settings['epochs']} epochs, killed after step "
        f"{settings['killed_after_step']}, in the second epoch, and resumed in the documented way; compared with the same library's training "
        "that was not stopped. A: shuffled; B: with Dropout; C: with Dropout and noise from the data set. Order only: the right "
        "samples at each step, but other weights. Seen twice and never: of the samples of the epoch that was cut, the worst column."
    )
    if "hardware" in result:
        text += f" {result['hardware']['cpu']}, torch {result['versions']['torch']}, {result['date'][:10]}."
    return text


def keyed_samples_table(result: dict[str, Any]) -> str:
    """The sentence of `keyed_samples`."""
    plain = np.array([row["plain"] for row in result["repeats"]])
    keyed = np.array([row["keyed"] for row in result["repeats"]])
    mean, low, high = mean_and_interval(keyed - plain)
    where = f" on {result['hardware']['cpu']}" if "hardware" in result else ""
    return (
        f"A sample that may draw costs {mean:.1f} us more ({low:.1f} to {high:.1f}){where}, in the process that builds it; mean of "
        f"{len(plain)} readings of {result['settings']['samples']:,} samples, and its interval of 95 %."
    )


_FLOORS = ("write and flush", "read", "sha256", "crc32")


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "checkpoints": checkpoints_table,
    "keyed_samples": keyed_samples_table,
    "loop_overhead": loop_overhead_table,
    "resume_exactness": resume_exactness_table,
    "save_profile": save_profile_table,
}


def with_tables(text: str, newest: Callable[[str], dict[str, Any]] = newest_result) -> str:
    """A page with the tables that it asks for.

    Raises:
        ValueError: A mark names no benchmark, or has no partner.
        FileNotFoundError: A benchmark has no result.
    """

    def filled(found: re.Match[str]) -> str:
        name = found[1]
        if name not in TABLES:
            raise ValueError(f"bench:{name} names no table; there are {', '.join(sorted(TABLES))}")
        return f"<!-- bench:{name} -->\n{TABLES[name](newest(name))}\n<!-- /bench:{name} -->"

    if single := ANY_MARK.search(MARK.sub("", text)):
        raise ValueError(
            f"{single[0]} has no partner; expected <!-- bench:NAME --> and <!-- /bench:NAME -->, each on its line"
        )
    return MARK.sub(filled, text)


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [
        p
        for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
        if p.exists()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new, encoding="utf-8")
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run: python benchmarks/table.py")
    print(f"rewrote {', '.join(stale)}" if stale else "all tables are up to date")


if __name__ == "__main__":
    main()
