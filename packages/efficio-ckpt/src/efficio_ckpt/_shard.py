"""Tensors in safetensors files: how they are divided, written, and read while they are checked."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from ._json import from_json, to_json
from ._tensor import ITEM_BYTES, MAX_DIMENSIONS, STORED_DTYPES, STORED_NAMES

SHARD_BYTES: Final = 2**30
"""A file holds at most this much, unless one tensor alone is larger: small enough to be uploaded again."""

_MAX_HEADER_BYTES: Final = 100_000_000
_HEADER_ALIGNMENT: Final = 64
_CHUNK_BYTES: Final = 2**24
_HANDED_BYTES: Final = 2**22


_DIED: Final = "the thread that takes checksums was ended"


@dataclass(frozen=True)
class FileDigest:
    """What a manifest says about one file."""

    size: int
    crc32: int
    sha256: str


def shards(sizes: Sequence[int], *, limit: int) -> list[list[int]]:
    """Divide tensors among files, in order.

    Args:
        sizes: Bytes of each tensor.
        limit: Bytes that one file may hold; a larger tensor has a file of its own.

    Example:
        >>> shards([4, 5, 20, 1], limit=10)
        [[0, 1], [2], [3]]
    """
    files: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(index)
        room -= size
    return files


def header(entries: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """Return the head of a safetensors file whose tensors follow in the given order.

    Args:
        entries: Name, stored dtype and shape of each tensor. Larger items first keeps each one aligned.

    Example:
        >>> header([("w", torch.float32, (2,))])[8:80]
        b'{"__metadata__":{"format":"pt"},"w":{"data_offsets":[0,8],"dtype":"F32",'
    """
    offset = 0
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape in entries:
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        content[name] = {"dtype": STORED_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = to_json(content)
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes, *, data_bytes: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, stored dtype and shape of the tensors of a safetensors file, in the order of their data.

    Args:
        text: The JSON part of the head.
        data_bytes: Bytes that follow it in the file.

    Raises:
        ValueError: The head is not one of a whole safetensors file: unknown dtypes, gaps, overlaps, sizes that do
            not agree.
    """
    content = from_json(text, max_bytes=_MAX_HEADER_BYTES, max_depth=4)
    if not isinstance(content, dict):
        raise ValueError("its head is no JSON object")
    content.pop("__metadata__", None)
    try:
        entries = sorted(
            (_described(name, entry) for name, entry in content.items()), key=lambda entry: entry[:2]
        )
    except (LookupError, TypeError) as error:
        raise ValueError(f"its head describes no tensors: {error!r:.80}") from error
    position = 0
    tensors = []
    for start, end, name, dtype, shape in entries:
        if start != position or end - start != prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"its head gives {name!r:.80} bytes {start} to {end}, which does not fit")
        position = end
        tensors.append((name, dtype, tuple(shape)))
    if position != data_bytes:
        raise ValueError(f"its head describes {position} bytes of data, and {data_bytes} follow")
    return tensors


def _described(name: str, entry: Any) -> tuple[int, int, str, torch.dtype, list[int]]:
    (start, end), dtype, shape = entry["data_offsets"], STORED_DTYPES[entry["dtype"]], entry["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise TypeError(f"{name!r:.80} has no shape")
    if not all(type(number) is int and 0 <= number < 2**62 for number in (start, end, *shape)):
        raise TypeError(f"{name!r:.80} has a size or an offset that is no count")
    return start, end, name, dtype, shape


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them.

    Args:
        tensor: Of a stored dtype.
    """
    if not tensor.numel():
        return memoryview(b"")  # an empty tensor may have strides that forbid the view below
    # What has one element counts as contiguous whatever its strides, and they forbid the view as well.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def digested(chunks: Iterable[Any], result: list[FileDigest]) -> Iterator[memoryview]:
    """Pass buffers on and append the digest of all of them to `result` at the end.

    The slower checksum is taken in a thread while the caller writes: one after the other takes longer than a fast disk.

    Args:
        chunks: Bytes-like buffers, which do not change.
        result: Receives one value.
    """
    with _digesting(result, with_sha256=True) as digest:
        for chunk in chunks:
            whole = memoryview(chunk)
            for start in range(0, whole.nbytes, _CHUNK_BYTES):
                part = whole[start : start + _CHUNK_BYTES]
                digest(part)
                yield part


@contextlib.contextmanager
def _digesting(result: list[FileDigest], *, with_sha256: bool) -> Iterator[Callable[[memoryview], None]]:
    """Yield a function that takes bytes in, the slowest checksum in a thread; `result` has their digest after the block.

    OSError if the thread dies, which says nothing about the bytes.
    """
    size, crc, sha = 0, 0, hashlib.sha256()
    group: list[memoryview] = []
    group_bytes = 0

    def update_crc(part: memoryview) -> None:
        nonlocal crc
        crc = zlib.crc32(part, crc)

    aside: Callable[[memoryview], None] = sha.update if with_sha256 else update_crc

    def take(part: memoryview) -> None:
        nonlocal size, group, group_bytes
        size += part.nbytes
        if with_sha256:
            update_crc(part)
        # To hand a small part over takes longer than its checksum.
        group.append(part)
        group_bytes += part.nbytes
        if group_bytes >= _HANDED_BYTES:
            hand(group)
            group, group_bytes = [], 0

    groups: queue.Queue[list[memoryview] | None] = queue.Queue(maxsize=4)

    def work() -> None:
        while (parts := groups.get()) is not None:
            for part in parts:
                aside(part)
        finished.append(True)

    def hand(parts: list[memoryview] | None) -> None:
        while not without_thread:
            try:
                groups.put(parts, timeout=1.0)
            except queue.Full:  # noqa: PERF203 - waiting is what this loop is for
                # Nobody would ever make room.
                if not thread.is_alive():
                    raise OSError(_DIED) from None
            else:
                return
        for part in parts or ():
            aside(part)

    finished: list[bool] = []
    without_thread = False
    thread = threading.Thread(target=work, name="efficio-ckpt-digest", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end
        without_thread = True
    try:
        yield take
    finally:
        with contextlib.suppress(OSError):
            hand(group)
            hand(None)
        if not without_thread:
            thread.join()
    if not (finished or without_thread):
        raise OSError(_DIED)
    result.append(FileDigest(size, crc, sha.hexdigest() if with_sha256 else ""))


class Checked:
    """A file that is read once from its start to its end; `checked` compares its checksums.

    Args:
        file: Read unbuffered through ``readinto``.
        size: Bytes that it should have.
        digest: Receives all that is read.
    """

    def __init__(self, file: BinaryIO, size: int, digest: Callable[[memoryview], None]) -> None:
        self._file = file
        self._digest = digest
        self.left = size

    def read_into(self, target: memoryview) -> None:
        """Fill a buffer with the next bytes.

        Args:
            target: Writable bytes, which are not changed before all is checked.

        Raises:
            ValueError: The file ends before the buffer is full.
        """
        for start in range(0, target.nbytes, _CHUNK_BYTES):
            part = target[start : start + _CHUNK_BYTES]
            filled = 0
            while filled < part.nbytes:
                count = self._file.readinto(part[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise ValueError(f"it ends {self.left - filled} bytes early")
                filled += count
            self._digest(part)
            self.left -= part.nbytes

    def read(self, size: int) -> bytes:
        """Return the next bytes.

        Args:
            size: How many.

        Raises:
            ValueError: The file is shorter than its manifest says.
        """
        if size > self.left:
            raise ValueError(f"it should have {size} bytes more and has {self.left}")
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)


@contextlib.contextmanager
def checked(file: BinaryIO, expected: FileDigest, *, with_sha256: bool) -> Iterator[Checked]:
    """Read a file while its checksums are taken in a thread, and compare them at the end of the block.

    Args:
        file: At its start, unbuffered.
        expected: What the manifest says.
        with_sha256: Take the slower digest as well.

    Raises:
        ValueError: The file is not what the manifest says, or was not read to its end.
    """
    result: list[FileDigest] = []
    with _digesting(result, with_sha256=with_sha256) as digest_of:
        reader = Checked(file, expected.size, digest_of)
        yield reader
        if reader.left or file.read(1):
            raise ValueError(f"it is longer than what its head describes by {reader.left or 'some'} bytes")
    (digest,) = result
    if digest.crc32 != expected.crc32 or (with_sha256 and digest.sha256 != expected.sha256):
        raise ValueError("its checksum differs: bytes have changed since it was written")


def read_shard(file: Checked) -> dict[str, Tensor]:
    """Return the tensors of one file, each with memory of its own.

    Args:
        file: At its start; it is read to its end.

    Raises:
        ValueError: The file is damaged.
    """
    head = int.from_bytes(file.read(8), "little")
    if head > _MAX_HEADER_BYTES:
        raise ValueError(f"its head should have {head} bytes, over the limit of {_MAX_HEADER_BYTES}")
    entries = parse_header(file.read(head), data_bytes=file.left)
    tensors = {}
    for name, dtype, shape in entries:
        try:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
        except RuntimeError as error:
            if not prod(shape):
                raise
            # The head and the size of the file agree, so it is the memory that is short.
            raise MemoryError(f"no memory for {name!r:.80} of shape {shape}") from error
        file.read_into(memory_of(tensors[name]))
    return tensors
