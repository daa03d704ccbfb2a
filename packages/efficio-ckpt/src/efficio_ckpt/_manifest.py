"""The manifest of a checkpoint: the file whose presence is the commit."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ._checkpoint import Checkpoint
from ._json import from_json, to_json
from ._shard import FileDigest

MANIFEST: Final = "MANIFEST.json"
STATE: Final = "state.json"
FORMAT: Final = 1

MAX_MANIFEST_BYTES: Final = 2**24
MAX_STATE_BYTES: Final = 2**28

_FOLDER: Final = re.compile(r"step-(\d{12,})-[0-9a-f]{8}")
_FILE: Final = re.compile(r"tensors-\d{5,9}\.safetensors|state\.json")
_CRC32: Final = re.compile(r"[0-9a-f]{8}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_DEPTH: Final = 64
MAX_SERIAL: Final = 2**53
"""No storage sees as many saves; a manifest with a larger number is damaged."""


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and found whole.

    Args:
        checkpoint: What callers are told.
        serial: Rises by one with each save in a storage, whatever the clock and the steps do.
        files: Digest of each data file.
        writer: Versions and platform of who wrote it, as far as it says.
    """

    checkpoint: Checkpoint
    serial: int
    files: dict[str, FileDigest]
    writer: dict[str, Any] = field(default_factory=dict)


def folder_name(step: int, token: str) -> str:
    """Return the folder of one attempt to save a step.

    Args:
        step: Optimizer steps, not negative.
        token: Eight hexadecimal digits that no other attempt has.

    Example:
        >>> folder_name(12345, "0a1b2c3d")
        'step-000000012345-0a1b2c3d'
    """
    return f"step-{step:012d}-{token}"


def folder_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for a name of another kind.

    Args:
        name: Any name.

    Example:
        >>> folder_step("step-000000012345-0a1b2c3d"), folder_step("notes.txt")
        (12345, None)
    """
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def is_data_file(name: str) -> bool:
    """Tell whether a checkpoint may hold a data file of this name.

    Args:
        name: Any name.

    Example:
        >>> is_data_file("tensors-00001.safetensors"), is_data_file("../state.json")
        (True, False)
    """
    return _FILE.fullmatch(name) is not None


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metadata that is the same after a trip through JSON.

    Args:
        metadata: Str keys and JSON types.

    Raises:
        TypeError: It holds something that JSON would lose or change.
    """
    try:
        copy = from_json(
            to_json(dict(metadata)), max_bytes=MAX_MANIFEST_BYTES // 2, max_depth=_MAX_DEPTH // 2
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata is not made of JSON types ({error}); put it into the tree") from error
    if not isinstance(copy, dict) or copy != metadata:
        raise TypeError("metadata changes in JSON (tuples, keys that are no str); put it into the tree")
    return copy


def size_problem(manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Return which file is not there with the size that the manifest gives, and how; None if all are.

    Args:
        manifest: Of a checkpoint.
        sizes: Bytes of the files that a listing of its folder shows.
    """
    for name, digest in manifest.files.items():
        if name not in sizes:
            return f"{name}: it is missing"
        if sizes[name] != digest.size:
            return f"{name}: it has {sizes[name]} bytes instead of {digest.size}"
    return None


def write_manifest(manifest: Manifest, *, writer: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest, its own digest inside.

    Args:
        manifest: What to write.
        writer: Versions and platform, for people who look for the cause of something.
    """
    checkpoint = manifest.checkpoint
    content = {
        "format": FORMAT,
        "step": checkpoint.step,
        "mode": checkpoint.mode,
        "serial": manifest.serial,
        "run_id": checkpoint.run_id,
        "created": checkpoint.created,
        "metadata": checkpoint.metadata,
        "writer": dict(writer),
        "files": {
            name: {"size": digest.size, "crc32": f"{digest.crc32:08x}", "sha256": digest.sha256}
            for name, digest in manifest.files.items()
        },
    }
    return to_json({**content, "digest": hashlib.sha256(to_json(content)).hexdigest()}) + b"\n"


def read_manifest(data: bytes, *, folder: str) -> Manifest:
    """Read a manifest and check it.

    Args:
        data: The text.
        folder: Name of the folder in which it lay.

    Raises:
        ValueError: It is damaged, of another format, of another folder, or names files that a checkpoint cannot have.
    """
    content = from_json(data, max_bytes=MAX_MANIFEST_BYTES, max_depth=_MAX_DEPTH)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    digest = content.pop("digest", None)
    if hashlib.sha256(to_json(content)).hexdigest() != digest:
        raise ValueError("its digest differs: bytes have changed since it was written")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r:.40}; this version reads {FORMAT}")
    try:
        files = {
            name: FileDigest(
                _natural(entry["size"]),
                int(_text(entry["crc32"], _CRC32), 16),
                _text(entry["sha256"], _SHA256),
            )
            for name, entry in content["files"].items()
        }
        checkpoint = Checkpoint(
            step=_natural(content["step"]),
            name=folder,
            mode=_text(content["mode"]),
            created=_time(content["created"]),
            bytes=sum(file.size for file in files.values()),
            run_id=None if content["run_id"] is None else _text(content["run_id"]),
            metadata=_object(content["metadata"]),
        )
        serial = _natural(content["serial"], limit=MAX_SERIAL)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it lacks a part: {error!r:.80}") from error
    if checkpoint.step != folder_step(folder):
        raise ValueError(f"it is of step {checkpoint.step}, not of this folder")
    strange = [name for name in files if not is_data_file(name)]
    if strange or STATE not in files:
        raise ValueError(f"it names {strange[0]!r:.80}" if strange else f"it names no {STATE}")
    if files[STATE].size > MAX_STATE_BYTES:
        raise ValueError(f"its {STATE} has {files[STATE].size} bytes, over the limit of {MAX_STATE_BYTES}")
    writer = content.get("writer")
    return Manifest(checkpoint, serial, files, writer if isinstance(writer, dict) else {})


def _natural(value: Any, *, limit: int = 2**62) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise TypeError(f"{value!r:.40} is no count")
    return value


def _text(value: Any, pattern: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
        raise TypeError(f"{value!r:.40} is no text of the kind")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is no object")
    return value


def _time(value: Any) -> float:
    if type(value) not in {int, float} or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} is no time")
    return float(value)
