import dataclasses
import importlib
import inspect

import pytest

VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "misc", "core", "tools"}
LONGEST_MODULE = 400


def public_modules(package):
    """The package, and the modules among its public names."""
    top = importlib.import_module(package.module)
    inner = [value for name in top.__all__ if inspect.ismodule(value := getattr(top, name))]
    return [top, *inner]


def missing_docstring(value):
    doc = inspect.getdoc(value) if not inspect.isclass(value) else value.__dict__.get("__doc__")
    # dataclasses write their signature where no docstring is
    written = dataclasses.is_dataclass(value) and (doc or "").startswith(f"{value.__name__}(")
    return not doc or written


def test_public_names_are_sorted_and_there(package):
    for module in public_modules(package):
        names = list(module.__all__)
        assert names, f"{module.__name__}.__all__ is empty"
        assert names == sorted(names)
        assert len(names) == len(set(names))
        for name in names:
            assert hasattr(module, name), f"{module.__name__}.{name}"


def test_public_functions_and_classes_have_docstrings(package):
    bare = [
        f"{module.__name__}.{name}"
        for module in public_modules(package)
        for name in module.__all__
        if (inspect.isroutine(value := getattr(module, name)) or inspect.isclass(value))
        if missing_docstring(value)
    ]
    assert not bare


def test_a_public_name_has_its_home_in_its_package(package):
    if package.module == "efficio":
        pytest.skip("efficio shows names of the five")
    foreign = [
        f"{module.__name__}.{name} is from {home}"
        for module in public_modules(package)
        for name in module.__all__
        if inspect.isfunction(value := getattr(module, name)) or inspect.isclass(value)
        if (home := value.__module__).split(".")[0] != package.module
    ]
    assert not foreign


def test_efficio_neither_renames_nor_wraps_a_name_of_the_five(packages):
    efficio = importlib.import_module("efficio")
    for package in packages:
        part = importlib.import_module(package.module)
        for name in set(part.__all__) & set(efficio.__all__):
            assert getattr(part, name) is getattr(efficio, name), f"{package.module}.{name}"


def test_modules_are_private_unless_they_are_public_names(package):
    public = {module.__name__.rpartition(".")[2] for module in public_modules(package)[1:]}
    for path in package.sources.rglob("*.py"):
        at_top = path.parent == package.sources
        assert path.stem.startswith("_") or (at_top and path.stem in public), path.name
    for path in package.sources.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert path.name.startswith("_") or path.name in public, path.name


def test_modules_are_named_after_a_noun_of_the_domain(package):
    vague = [path.name for path in package.sources.rglob("*.py") if path.stem.strip("_") in VAGUE]
    assert not vague


def test_no_module_is_longer_than_400_lines(package):
    long = {
        path.name: lines
        for path in package.sources.rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_MODULE
    }
    assert not long


def test_the_package_tells_type_checkers_that_it_is_typed(package):
    assert (package.sources / "py.typed").is_file()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(dataclasses.make_dataclass("Bare", ["x"]), id="dataclass"),
        pytest.param(lambda: None, id="function"),
        pytest.param(type("Child", (dict,), {}), id="inherited"),
    ],
)
def test_a_missing_docstring_is_seen(value):
    assert missing_docstring(value)
