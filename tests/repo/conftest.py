from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Package:
    distribution: str
    module: str
    folder: Path
    sources: Path


def read_package(folder: Path) -> Package:
    module = folder.name.replace("-", "_")
    return Package(folder.name, module, folder, folder / "src" / module)


PACKAGES = tuple(read_package(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml")))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def packages() -> tuple[Package, ...]:
    return PACKAGES


@pytest.fixture(params=PACKAGES, ids=lambda package: package.module)
def package(request: pytest.FixtureRequest) -> Package:
    return request.param
