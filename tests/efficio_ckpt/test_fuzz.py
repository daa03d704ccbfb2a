"""Whatever lies in a folder, reading it is an older good state or a CheckpointError: bounded in time and memory, and no code is run."""

import contextlib
import copy
import hashlib
import json
import logging
import os
import pickle
import random
import shutil
import sys
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from efficio_ckpt import CheckpointError, list_checkpoints, load_checkpoint, load_state, save_state, verify
from efficio_ckpt._json import from_json, to_json
from efficio_ckpt._leaf import array_from
from efficio_ckpt._manifest import MANIFEST, MAX_SERIAL, STATE
from efficio_ckpt._shard import parse_header

DATA = "tensors-00001.safetensors"
MORE = "tensors-00002.safetensors"
HTML = b"<!doctype html><html><body>Quota exceeded</body></html>"


def tree(step):
    weight = torch.arange(60.0).reshape(6, 10) + step
    return {
        "step": step,
        "w": weight,
        "tied": weight,
        "row": weight[2],
        "turned": weight.t().clone().t(),
        "spread": torch.ones(1).expand(5),
        "c": torch.ones(3, dtype=torch.complex64),
        "a": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "words": ("a" * 50, b"bytes", 1.5, float("nan"), 2**70, None, True),
        7: torch.float16,
        "large": torch.zeros(5000, dtype=torch.int16) + step,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "scalar": np.float32(3),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[2, 0, 2], [1, 3, 1]]), torch.ones(3) + step, (4, 5), check_invariants=True
        ),
    }


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Steps 1 and 2, the newer one in two data files."""
    shm = Path("/dev/shm")
    root = tmp_path_factory.mktemp("pristine") if not shm.is_dir() else shm / f"fuzz-{os.getpid()}"
    for step in (1, 2):
        save_state(root / "run", tree(step), step=step, shard_bytes=8000)
    yield root / "run"
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def newer(root):
    (folder,) = root.glob("step-000000000002-*")
    return folder


def outcome(root):
    """The step that loads, 0 for a CheckpointError; anything else is raised. The same for reading all, and for the list."""
    list_checkpoints(root)
    with contextlib.suppress(CheckpointError):
        verify(root)
    try:
        checkpoint, loaded = load_checkpoint(root)
    except CheckpointError:
        return 0
    assert checkpoint.step != 1 or loaded["step"] == 1
    return checkpoint.step


def resealed(content):
    content = {key: value for key, value in content.items() if key != "digest"}
    return to_json({**content, "digest": hashlib.sha256(to_json(content)).hexdigest()}) + b"\n"


def vouched(folder, name, data):
    """Replace a data file and make the manifest agree, as an attacker does."""
    (folder / name).write_bytes(data)
    content = json.loads((folder / MANIFEST).read_bytes())
    content["files"][name] = {
        "size": len(data),
        "crc32": f"{zlib.crc32(data):08x}",
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (folder / MANIFEST).write_bytes(resealed(content))


class Mutable:
    """A copy of the newer checkpoint's files, put back after each attack."""

    def __init__(self, pristine, root):
        self.root = root
        if not root.exists():
            shutil.copytree(pristine, root)
        self.folder = newer(root)
        self.files = {path.name: path.read_bytes() for path in newer(pristine).iterdir()}

    def restore(self):
        for path in self.root.glob("*/DAMAGE.txt"):
            path.unlink()
        for path in self.folder.iterdir():
            path.unlink()
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)


@pytest.fixture
def victim(pristine, quick_path):
    return Mutable(pristine, quick_path / "run")


def is_silent(name, data, files):
    """The line end of the manifest says nothing, nor does the seventeenth digit of its time, which no float64 has."""
    if name != MANIFEST:
        return False
    try:
        return json.loads(data) == json.loads(files[name])
    except ValueError:
        return False


def test_a_thousand_flipped_bits_are_found(victim):
    draw = random.Random(os.urandom(8))
    total = {name: len(data) for name, data in victim.files.items()}
    flips = draw.choices(list(total), weights=[1 for _ in total], k=1000)
    for name in flips:
        position, bit = draw.randrange(total[name]), draw.randrange(8)
        data = bytearray(victim.files[name])
        data[position] ^= 1 << bit
        (victim.folder / name).write_bytes(data)
        if not is_silent(name, data, victim.files):
            step = load_checkpoint(victim.root)[0].step
            assert step == 1, (name, position, bit)
        (victim.folder / name).write_bytes(victim.files[name])
        (victim.folder / "DAMAGE.txt").unlink(missing_ok=True)
    assert outcome(victim.root) == 2


def test_a_cut_at_every_page_and_beside_it_is_found(victim):
    for name, data in victim.files.items():
        ends = {end + by for end in range(0, len(data) + 1, 4096) for by in (-1, 0, 1)} | {len(data) - 2}
        for end in sorted(end for end in ends if 0 <= end < len(data)):
            if not is_silent(name, data[:end], victim.files):
                (victim.folder / name).write_bytes(data[:end])
                assert outcome(victim.root) == 1, (name, end)
        victim.restore()


def test_zeroed_tails_and_holes_are_found(victim):
    for name, data in victim.files.items():
        for size in (1, 2, 512, 4096, len(data)):
            for where in ("tail", "middle"):
                start = max(0, len(data) - size if where == "tail" else (len(data) - size) // 2)
                changed = data[:start] + bytes(len(data[start : start + size])) + data[start + size :]
                silent = changed == data or (name == MANIFEST and changed[:-1] == data[:-1])
                if not silent:
                    (victim.folder / name).write_bytes(changed)
                    assert outcome(victim.root) == 1, (name, size, where)
        victim.restore()


def test_files_of_another_checkpoint_or_page_are_found(victim):
    (older,) = victim.root.glob("step-000000000001-*")
    for name in victim.files:
        for foreign in [(older / other).read_bytes() for other in victim.files] + [HTML, HTML * 1000, b""]:
            if foreign != victim.files[name]:
                (victim.folder / name).write_bytes(foreign)
                assert outcome(victim.root) == 1, name
        victim.restore()


def a_head(entries, tail=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + tail


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADS = {
    "length of 100 MB": (100_000_000).to_bytes(8, "little") + b"{}",
    "length over the limit and there": lambda: (100_000_001).to_bytes(8, "little") + b" " * 100_000_001,
    "length of -1": (2**64 - 1).to_bytes(8, "little") + b"{}",
    "negative offsets": a_head({"w": entry([1], [-4, 0])}),
    "negative shape": a_head({"w": entry([-1], [0, -4])}),
    "two negative sizes": a_head({"w": entry([-1, -1], [0, 4])}, bytes(4)),
    "infinite offsets": a_head(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}', bytes(4)),
    "NaN offsets": a_head(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[NaN,4]}}', bytes(4)),
    "float offsets": a_head({"w": entry([1], [0.0, 4.0])}, bytes(4)),
    "true as an offset": a_head({"w": entry([1], [False, 4])}, bytes(4)),
    "huge offsets": a_head({"w": entry([1], [0, 10**19])}, bytes(4)),
    "overlap": a_head({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, bytes(12)),
    "the same bytes twice": a_head({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, bytes(8)),
    "a name twice": a_head(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "a shape of a million sizes": a_head({"w": entry([2**61] * 10**6, [0, 4])}, bytes(4)),
    "a shape that overflows": a_head({"w": entry([2**61, 2**61, 0], [0, 0])}),
    "no shape": a_head({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "a list as dtype": a_head({"w": entry([1], [0, 4], dtype=["F32"])}, bytes(4)),
    "deep": a_head(b'{"w":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "quotes without end": a_head(b'{"' + b'\\"' * 10**6),
    "UTF-16": a_head('{"w":1}'.encode("utf-16")),
    "numbers of a million digits": a_head(b'{"w":' + b"9" * 10**6 + b"}"),
    "many names": a_head(
        b"{"
        + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(3 * 10**4))
        + b"}"
    ),
    "no object": a_head(b"[]"),
    "a pickle": pickle.dumps({"w": 1}),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_an_absurd_head_that_the_manifest_vouches_for_is_refused(victim, head):
    vouched(victim.folder, MORE, head() if callable(head) else head)
    begun = time.perf_counter()
    assert outcome(victim.root) == 1
    assert time.perf_counter() - begun < 30, "far below what unbounded work would take"


def a_state(node, names=None):
    return lambda names_there: to_json({"format": 1, "names": names or names_there, "tree": node})


def text_state(text):
    return lambda names: b'{"format":1,"names":' + to_json(names) + b',"tree":' + text + b"}"


BOMB = [0, "uint8", [2, 2 * 10**9], [0, 0], 0]
STATES = {
    "deep": text_state(b"[" * 10**6 + b"]" * 10**6),
    "deep and not closed": lambda names: b'{"format":1,"tree":' + b'{"dict":[[' * 10**5,
    "deep after quotes that lie": text_state(b'["\\\\",' + b"[" * 10**6 + b"]" * 10**6 + b"]"),
    "deep after a quote that is escaped": text_state(b'["\\"",' + b"[" * 10**6 + b"]" * 10**6 + b"]"),
    "quotes without end": text_state(b'"' + b'\\"' * 10**6),
    "a key twice": text_state(b'{"tuple":[],"tuple":[1]}'),
    "a number of a million digits": text_state(b"9" * 10**6),
    "a huge exponent": text_state(b'{"float":1e999}'),
    "a hexadecimal number of text": a_state({"int": "zz"}),
    "an array of strides of zero": a_state({"view": BOMB, "array": ["|u1", [2, 2 * 10**9], "C"]}),
    "an array of no tensor": a_state({"array": ["|u1", [1], "C"]}),
    "an array of objects": a_state({"tensor": [0, "float32", [6, 10]], "array": ["|O", [60], "C"]}),
    "an array with a shape of text": a_state(
        {"tensor": [0, "float32", [6, 10]], "array": ["<f4", "ab", "C"]}
    ),
    "a view behind the end": a_state({"view": [0, "float32", [1], [1], 10**12]}),
    "a view with negative strides": a_state({"view": [0, "float32", [2], [-1], 4]}),
    "a view of a million sizes": a_state({"view": [0, "float32", [1] * 10**6, [1] * 10**6, 0]}),
    "a tensor that is not there": a_state({"tensor": [10**9, "float32", [1]]}),
    "a tensor with a negative number": a_state({"tensor": [-1, "float32", [1]]}),
    "a tensor of another dtype": a_state({"tensor": [0, "int32", [6, 10]]}),
    "a tensor of no dtype": a_state({"tensor": [0, "nothing", [1]]}),
    "a tensor of nothing": a_state({"tensor": []}),
    "many forms of one tensor": a_state(
        [{"tensor": [0, "float32", [6, 10], [10, 1]]}, {"tensor": [0, "float32", [6, 10], [1, 6]]}]
    ),
    "a module of torch's as a dtype": a_state({"dtype": "onnx"}),
    "a function of torch's as a dtype": a_state({"dtype": "load"}),
    "a device of the user's": a_state({"device": "cpu; import os"}),
    "code as a kind": a_state({"eval": "1"}),
    "a list as a key": a_state({"dict": [[[1], 2]]}),
    "a key of a dict twice": a_state({"dict": [["a", 1], ["a", 2]]}),
    "a dict that is no list": a_state({"dict": 7}),
    "a pair of three": a_state({"dict": [[1, 2, 3]]}),
    "a size of text": a_state({"Size": "ab"}),
    "bytes that are none": a_state({"bytes": "%%%"}),
    "a NumPy scalar that is too long": a_state({"numpy": ["<U99999999", "00"]}),
    "a NumPy scalar of objects": a_state({"numpy": ["|O8", "00" * 8]}),
    "a strange node": a_state({"tuple": [1], "dict": []}),
    "an empty node": a_state({}),
    "names twice": a_state(1, names=["w", "w"]),
    "names that are numbers": a_state(1, names=[1, 2]),
    "no format": lambda names: b'{"names":[],"tree":1}',
    "HTML": lambda names: HTML,
    "a pickle": lambda names: pickle.dumps({"format": 1}),
    "UTF-16": lambda names: a_state(1)(names).decode().encode("utf-16"),
    "UTF-8 with a mark": lambda names: b"\xef\xbb\xbf" + a_state(1)(names),
    "nothing": lambda names: b"",
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_an_absurd_state_that_the_manifest_vouches_for_is_refused(victim, state):
    names = json.loads(victim.files[STATE])["names"]
    vouched(victim.folder, STATE, state(names))
    modules = set(sys.modules)
    begun = time.perf_counter()
    assert outcome(victim.root) == 1
    assert time.perf_counter() - begun < 30
    assert {name for name in set(sys.modules) - modules if name.startswith("torch")} == set()


def lie(**changes):
    return lambda content: content.update(changes)


def lie_of_file(name, **changes):
    return lambda content: content["files"].setdefault(name, dict(content["files"][DATA])).update(changes)


LIES = {
    "path that climbs": lie_of_file("../state.json"),
    "absolute path": lie_of_file("/etc/passwd"),
    "path of Windows": lie_of_file("..\\state.json"),
    "device of Windows": lie_of_file("CON"),
    "name with a zero": lie_of_file("tensors-00001.safetensors\0"),
    "name with a line end": lie_of_file("tensors-00001.safetensors\n"),
    "name in other digits": lie_of_file("tensors-\u0660\u0660\u0660\u0660\u0661.safetensors"),
    "file that is not there": lie_of_file("tensors-00009.safetensors"),
    "size beyond": lie_of_file(DATA, size=10**18),
    "size as a float": lie_of_file(DATA, size=1.0),
    "size true": lie_of_file(DATA, size=True),
    "checksum of a million digits": lie_of_file(DATA, crc32="f" * 10**6),
    "checksum with a sign": lie_of_file(DATA, crc32="-0000001"),
    "checksum as a number": lie_of_file(DATA, crc32=7),
    "digest of a list": lie_of_file(DATA, sha256=[]),
    "files a list": lie(files=[]),
    "no files": lie(files={}),
    "format 2": lie(format=2),
    "step of another": lie(step=1),
    "step of text": lie(step="2"),
    "step beyond": lie(step=10**19),
    "serial beyond": lie(serial=10**18),
    "serial negative": lie(serial=-1),
    "time of text": lie(created="nan"),
    "time true": lie(created=True),
    "run a list": lie(run_id=[]),
    "mode a list": lie(mode=[]),
    "metadata pairs": lie(metadata=[["a", 1]]),
    "metadata deep": lambda content: content.update(metadata={"a": json.loads("[" * 80 + "]" * 80)}),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES.keys())
def test_a_manifest_that_lies_with_a_right_digest_is_refused(victim, change):
    content = json.loads(victim.files[MANIFEST])
    change(content)
    (victim.folder / MANIFEST).write_bytes(resealed(content))
    assert outcome(victim.root) == 1
    save_state(victim.root, tree(3), step=3)
    assert load_checkpoint(victim.root)[0].step == 3


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":2}',
        b"[" * 10**6,
        b'"' + b'\\"' * 10**6,
        b" " * (2**24 + 1),
        HTML,
        b"\0" * 5000,
        b"",
        b"null",
    ],
    ids=["a key twice", "deep", "quotes", "too large", "HTML", "zeros", "empty", "null"],
)
def test_a_manifest_that_is_none_is_refused(victim, text):
    (victim.folder / MANIFEST).write_bytes(text)
    begun = time.perf_counter()
    assert outcome(victim.root) == 1
    assert time.perf_counter() - begun < 10


def test_a_save_after_which_none_could_come_is_refused_and_not_lost(victim):
    content = json.loads(victim.files[MANIFEST])
    content["serial"] = MAX_SERIAL - 1
    (victim.folder / MANIFEST).write_bytes(resealed(content))
    assert outcome(victim.root) == 2
    with pytest.raises(CheckpointError, match="move that folder away"):
        save_state(victim.root, tree(3), step=3)
    assert outcome(victim.root) == 2


def test_a_file_that_is_larger_than_the_memory_is_no_raw_error(victim):
    size = 2**46
    text = json.dumps({"w": entry([size], [0, size], dtype="U8")}).encode()
    head = len(text).to_bytes(8, "little") + text
    path = victim.folder / MORE
    path.write_bytes(head)
    try:
        os.truncate(path, len(head) + size)
    except OSError as error:
        pytest.skip(f"no file with holes of {size} bytes here: {error}")
    content = json.loads(victim.files[MANIFEST])
    content["files"][MORE].update(size=len(head) + size)
    (victim.folder / MANIFEST).write_bytes(resealed(content))
    with pytest.raises(CheckpointError, match="needs more memory than there is"):
        load_state(victim.root)


def test_a_long_text_takes_no_more_memory_than_a_few_copies():
    text = b'["' + b"\\n" * 2_000_000 + b'"]'
    tracemalloc.start()
    try:
        from_json(text, max_bytes=2**28, max_depth=9)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(text) + 50 * 2**20, "a pattern of regular expressions took 110 times the text"


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from(
            [
                "float32",
                "uint8",
                "complex64",
                "C",
                "F",
                "<f4",
                "|u1",
                "w",
                "0x1p0",
                "cpu",
                STATE,
                DATA,
                "sparse_coo",
            ]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [
                    "tensor",
                    "view",
                    "sparse",
                    "array",
                    "dict",
                    "tuple",
                    "int",
                    "float",
                    "nan",
                    "bytes",
                    "dtype",
                    "Size",
                    "numpy",
                    "a",
                ]
            ),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=8,
)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], (*path, index))


@st.composite
def changed(draw, value):
    """The value with one to three of its places replaced, removed, doubled or swapped."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places(value), key=repr)))
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        act = draw(st.sampled_from(["replace", "remove", "double", "near"]))
        old = parent[path[-1]]
        if act == "replace":
            parent[path[-1]] = draw(json_values)
        elif act == "remove":
            del parent[path[-1]]
        elif act == "double" and isinstance(parent, list):
            parent.insert(path[-1], copy.deepcopy(old))
        elif type(old) is int:
            parent[path[-1]] = old + draw(st.sampled_from([-1, 1, 2**31, -(2**63), 2**62]))
        elif isinstance(old, str):
            parent[path[-1]] = old + draw(st.sampled_from(["\0", "0", "/..", "é"]))
    return value


def mutant_of(draw, files):
    """A checkpoint with one file changed in its structure, and vouched for."""
    name = draw(st.sampled_from([STATE, DATA, MORE, MANIFEST]))
    if name == MANIFEST:
        content = json.loads(files[MANIFEST])
        content.pop("digest")
        return name, draw(changed(content))
    if name == STATE:
        return name, to_json(draw(changed(json.loads(files[STATE]))))
    size = int.from_bytes(files[name][:8], "little")
    head = draw(changed(json.loads(files[name][8 : 8 + size])))
    tail = files[name][8 + size :]
    tail = tail[: draw(st.sampled_from([len(tail), len(tail) - 1, 0]))]
    text = to_json(head)
    return name, draw(st.sampled_from([len(text), len(text) + 1, 0, 2**63])).to_bytes(
        8, "little"
    ) + text + tail


def put(folder, name, data):
    if name == MANIFEST:
        (folder / MANIFEST).write_bytes(resealed(data) if isinstance(data, dict) else to_json(data))
    else:
        vouched(folder, name, data)


EXAMPLES = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@EXAMPLES
@given(data=st.data())
def test_a_checkpoint_that_was_changed_in_its_structure_is_refused_or_read(pristine, tmp_path_factory, data):
    victim = Mutable(pristine, pristine.parent / "mutant")
    put(victim.folder, *mutant_of(data.draw, victim.files))
    try:
        assert outcome(victim.root) in {1, 2}
    finally:
        victim.restore()


@EXAMPLES
@given(data=st.data())
def test_bytes_that_were_changed_anywhere_are_found(pristine, data):
    victim = Mutable(pristine, pristine.parent / "bytes")
    name = data.draw(st.sampled_from(sorted(victim.files)))
    whole = victim.files[name]
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 5000)))
    new = whole[:start] + data.draw(st.binary(max_size=20)) + whole[end:]
    (victim.folder / name).write_bytes(new)
    try:
        silent = new == whole or (name == MANIFEST and new.rstrip() == whole.rstrip())
        assert outcome(victim.root) == (2 if silent else 1)
    finally:
        victim.restore()


@EXAMPLES
@given(text=st.one_of(st.binary(max_size=60), json_values.map(lambda value: json.dumps(value).encode())))
def test_any_text_is_json_or_a_value_error_and_any_head_as_well(text):
    for read in (
        lambda: from_json(text, max_bytes=1000, max_depth=20),
        lambda: parse_header(text, data_bytes=8),
    ):
        try:
            read()
        except ValueError:
            continue


@EXAMPLES
@given(value=json_values)
def test_canonical_json_is_read_back_at_its_depth(value):
    text = to_json(value)
    depth = max(len(path) for path in places(value)) + 1
    assert from_json(text, max_bytes=10**6, max_depth=depth) == value


def test_an_array_is_never_larger_than_its_memory():
    with pytest.raises(ValueError, match="in one piece"):
        array_from(torch.ones(1).expand(4, 5), "<f4", [4, 5], "C")


@pytest.mark.torture
@settings(EXAMPLES, max_examples=20_000)
@given(data=st.data())
def test_thousands_of_changed_checkpoints_are_refused_or_read(pristine, data):
    victim = Mutable(pristine, pristine.parent / "torture")
    put(victim.folder, *mutant_of(data.draw, victim.files))
    try:
        assert outcome(victim.root) in {1, 2}
    finally:
        victim.restore()
