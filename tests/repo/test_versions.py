import ast
import importlib
import sys

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def project(package):
    return tomllib.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def literal_versions(package):
    tree = ast.parse((package.sources / "__init__.py").read_text(encoding="utf-8"))
    return [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets)
    ]


def test_six_packages_share_one_version(packages):
    versions = {package.distribution: project(package)["version"] for package in packages}
    assert len(versions) == 6
    assert len(set(versions.values())) == 1, versions


def test_the_module_repeats_the_version_as_a_literal(package):
    version = project(package)["version"]
    assert literal_versions(package) == [version]
    assert importlib.import_module(package.module).__version__ == version


def test_efficio_pins_its_five_packages_to_its_own_version(packages):
    efficio = next(package for package in packages if package.module == "efficio")
    pins = {}
    for text in project(efficio)["dependencies"]:
        requirement = Requirement(text)
        if requirement.name.startswith("efficio-"):
            pins[requirement.name] = str(requirement.specifier)
    version = project(efficio)["version"]
    assert pins == {package.distribution: f"=={version}" for package in packages if package is not efficio}


def test_extras_of_efficio_pass_on_extras_that_exist(packages):
    extras = {
        package.distribution: set(project(package).get("optional-dependencies", {})) for package in packages
    }
    efficio = next(package for package in packages if package.module == "efficio")
    for wanted in project(efficio).get("optional-dependencies", {}).values():
        for text in wanted:
            requirement = Requirement(text)
            assert requirement.extras <= extras.get(requirement.name, requirement.extras), text


def test_no_package_of_the_five_requires_a_sibling(package):
    if package.module == "efficio":
        pytest.skip("efficio composes the five")
    names = [Requirement(text).name for text in project(package)["dependencies"]]
    assert not [name for name in names if name.startswith("efficio")]


def test_the_changelog_has_a_section_for_the_version(root, packages):
    version = project(packages[0])["version"]
    assert f"\n## [{version}]" in (root / "CHANGELOG.md").read_text(encoding="utf-8")
