"""The command ``efficio``: what lies in a storage, whether it is whole, and how it is fetched or removed."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ._progress import Progress

if TYPE_CHECKING:
    from efficio_ckpt import Checkpoint

_COLUMNS = ("step", "name", "run", "size", "age", "where")


def size_text(size: int) -> str:
    """Bytes for people.

    >>> size_text(512), size_text(1536), size_text(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    power = min(4, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{size} B"


def age_text(seconds: float) -> str:
    """How long ago, in the largest unit that it fills.

    >>> age_text(5), age_text(7300), age_text(200000)
    ('5 s', '2 h', '2 d')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def plain(text: str) -> str:
    """One line that a terminal shows as it is: what is stored may come from anywhere.

    >>> plain("a" + chr(27) + "[31m")
    'a?[31m'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def masked(text: str) -> str:
    """A message without the user, password and query of the URLs in it.

    >>> masked("no s3://key:secret@bucket/run?token=abc here")
    'no s3://bucket/run here'
    """
    return re.sub(r"(://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", re.sub(r"://[^\s'\"]*@", "://", text))


def table(checkpoints: Sequence[Checkpoint], *, now: float) -> list[str]:
    """One aligned line for each checkpoint, below a head."""
    rows = [
        _COLUMNS,
        *(
            (
                str(at.step),
                at.name,
                plain((at.run_id or "")[:8]),
                size_text(at.bytes),
                age_text(now - at.created),
                plain(str(at.metadata.get("device", ""))),
            )
            for at in checkpoints
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def contents(checkpoint: Checkpoint, tree: Any) -> dict[str, Any]:
    """What is in a checkpoint, of JSON types. A parameter is a tensor that an optimizer names."""
    whole: Mapping[Any, Any] = tree if isinstance(tree, dict) else {"tree": tree}
    inner = whole.get("objects")
    objects: Mapping[Any, Any] = inner if isinstance(inner, dict) else whole
    try:
        progress = Progress.from_tree(whole["progress"]).to_tree()
    except (LookupError, TypeError, AttributeError):
        progress = None
    named = {name for state in objects.values() for name in _parameter_names(state)}
    shapes = {
        str(key): {path: list(leaf.shape) for path, leaf in _arrays(state)} for key, state in objects.items()
    }
    values = {
        f"{key}.{path}": math.prod(shape) for key, found in shapes.items() for path, shape in found.items()
    }
    return {
        "step": checkpoint.step,
        "name": checkpoint.name,
        "run_id": checkpoint.run_id,
        "created": checkpoint.created,
        "bytes": checkpoint.bytes,
        "parameters": sum(values.get(name, 0) for name in named),
        "objects": shapes,
        "progress": progress,
        "environment": checkpoint.metadata,
    }


def _arrays(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _arrays(value, f"{path}.{key}" if path else str(key))


def _parameter_names(state: Any) -> Iterator[str]:
    groups = state.get("param_groups") if isinstance(state, dict) else None
    for group in groups if isinstance(groups, list) else ():
        names = group.get("params") if isinstance(group, dict) else None
        yield from (name for name in names or () if isinstance(name, str))


def _ls(args: argparse.Namespace) -> int:
    from efficio_ckpt import take_inventory

    found = take_inventory(args.storage)
    if found.checkpoints:
        print(*table(found.checkpoints, now=time.time()), sep="\n")
    elif not found.damaged:
        print(f"no checkpoint in {found.place}")
    for damage in found.damaged.values():
        print(plain(f"damaged: {damage}"))
    for name in found.unfinished:
        print(f"unfinished: {name}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from efficio_ckpt import load_checkpoint

    content = contents(*load_checkpoint(args.storage, step=args.step))
    if args.json:
        print(json.dumps(content, indent=2))
        return 0
    print(f"step {content['step']}, {content['name']}, {size_text(content['bytes'])}")
    print(plain(f"run: {content['run_id']}"))
    print(f"parameters: {content['parameters']:,}")
    for name, shapes in content["objects"].items():
        largest = sorted(shapes.items(), key=lambda item: -math.prod(item[1]))[:3]
        shown = ", ".join(f"{path} {tuple(shape)}" for path, shape in largest)
        print(plain(f"{name}: {len(shapes)} tensors{f'; largest {shown}' if shown else ''}"))
    progress = content["progress"]
    if progress is not None:
        print(
            plain(f"progress: step {progress['step']}, {progress['seconds']:.0f} s, seed {progress['seed']}")
        )
        for name, at in progress["loops"].items():
            print(plain(f"loop {name}: epoch {at['epoch']}, {at['samples']} samples into it"))
    for name, value in content["environment"].items():
        print(plain(f"{name}: {value}"))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from efficio_ckpt import CheckpointError, take_inventory, verify

    place = take_inventory(args.storage).place
    try:
        whole = verify(args.storage)
    except CheckpointError as error:
        # A storage that cannot be asked has said so with an error of its own, and nothing is known to be damaged.
        if isinstance(error.__cause__, (OSError, MemoryError)):
            raise
        print(masked(plain(str(error))), file=sys.stderr)
        return 1
    print(f"{len(whole)} checkpoints in {place} are whole")
    return 0


def _pull(args: argparse.Namespace) -> int:
    from efficio_ckpt import copy_checkpoint

    try:
        copy = copy_checkpoint(args.storage, args.folder, step=args.step)
    except FileExistsError as error:
        print(error)
    else:
        print(f"step {copy.step}, {size_text(copy.bytes)}, is now there as {copy.name}")
    return 0


def _rm(args: argparse.Namespace) -> int:
    from efficio_ckpt import remove_checkpoint, take_inventory

    found = take_inventory(args.storage)
    names = list(dict.fromkeys(args.names))
    known = {at.name for at in found.checkpoints} | found.damaged.keys()
    for name in names:
        if name not in known:
            kind = "an unfinished save" if name in found.unfinished else "no checkpoint"
            raise ValueError(f"{name!r} is {kind} in '{found.place}'; nothing was removed")
    left = {at.run_id for at in found.checkpoints if at.name not in names}
    last = [at.name for at in found.checkpoints if at.name in names and at.run_id not in left]
    if last and not args.all:
        raise ValueError(
            f"{', '.join(last)} is the last good one of its run; give --all to remove it as well"
        )
    if not args.yes:
        try:
            answer = input(f"remove {', '.join(names)} from {found.place}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            print("nothing was removed")
            return 1
    for name in names:
        remove_checkpoint(args.storage, name)
        print(f"removed {name}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(masked(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="efficio")
    ckpt = parser.add_subparsers(required=True, metavar="ckpt").add_parser("ckpt", help="stored checkpoints")
    actions = ckpt.add_subparsers(required=True, metavar="ls|show|verify|pull|rm")
    for name, action, text in (
        ("ls", _ls, "list the checkpoints, the one saved last first"),
        ("show", _show, "say what is in one; all of it is read and checked"),
        ("verify", _verify, "read and compare every byte"),
        ("pull", _pull, "copy one, checked on the way"),
        ("rm", _rm, "remove some"),
    ):
        one = actions.add_parser(name, help=text)
        one.add_argument("storage", help="a path, hf://user/repository or another URL")
        one.set_defaults(action=action)
        if name == "pull":
            one.add_argument("folder", help="where the copy goes")
        if name in {"show", "pull"}:
            one.add_argument("--step", type=int, help="the newest of this step, not of all")
        if name == "show":
            one.add_argument("--json", action="store_true")
        if name == "rm":
            one.add_argument("names", nargs="+", metavar="name", help="as ls shows it")
            one.add_argument("--yes", action="store_true", help="do not ask")
            one.add_argument("--all", action="store_true", help="also the last good one of a run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for damage or a "no", 2 for what could not be done."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.action(args)
    except (RuntimeError, OSError, ValueError) as error:
        print(f"efficio: {masked(plain(str(error)))}", file=sys.stderr)
        return 2
    return status
