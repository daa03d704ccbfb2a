"""Tokens and passwords, from where the platform keeps them."""

import importlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType

from ._host import host


def secret(name: str, *, environ: Mapping[str, str] | None = None) -> str:
    """Looks a secret up in the environment, then in the secrets of Colab or Kaggle.

    Read secrets when a run starts: Colab asks the browser, which may be gone hours later. On Kaggle the
    secrets of Colab are not asked, although the image may hold that module, as nobody would answer.
    The value appears in no message of this function; errors of the platforms are not passed on, as theirs
    can quote what the service answered.

    Args:
        name: The secret's name, for example `"HF_TOKEN"`.
        environ: Variables to look in first; None takes those of this process.

    Returns:
        The value as it is stored, never empty.

    Raises:
        ValueError: An empty name.
        LookupError: The secret is in none of the places; the message says which were asked.

    Examples:
        >>> secret("HF_TOKEN", environ={"HF_TOKEN": "hf_example"})
        'hf_example'
    """
    if not isinstance(name, str) or not name.strip():
        msg = f"name={name!r} is not the name of a secret; give for example 'HF_TOKEN'"
        raise ValueError(msg)
    variables: Mapping[str, str] = os.environ if environ is None else environ
    if value := variables.get(name):
        return value
    looked = ["the environment (not set)"]
    for place, module_name, read in _stores(variables):
        value, why = _ask(module_name, read, name)
        if value:
            return value
        looked.append(f"{place} ({why})")
    msg = f"secret {name!r} was not found in {', '.join(looked)}; set it there and allow this notebook to read it"
    raise LookupError(msg)


_Read = Callable[[ModuleType, str], object]


def _stores(environ: Mapping[str, str]) -> list[tuple[str, str, _Read]]:
    colab: tuple[str, str, _Read] = ("Colab's secrets", "google.colab.userdata", _read_colab)
    kaggle: tuple[str, str, _Read] = ("Kaggle's secrets", "kaggle_secrets", _read_kaggle)
    return [kaggle] if host(environ) == "kaggle" else [colab, kaggle]


def _read_colab(userdata: ModuleType, name: str) -> object:
    return userdata.get(name)


def _read_kaggle(kaggle_secrets: ModuleType, name: str) -> object:
    return kaggle_secrets.UserSecretsClient().get_secret(name)


def _ask(module_name: str, read: _Read, name: str) -> tuple[str, str]:
    """Returns the value, or an empty text and why there is none."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return "", "not on this machine"
    # The module's own errors, of whatever version, and OSError for the network. Outside the notebook's process
    # Colab's client fails with AttributeError, because there is no kernel that could ask the browser.
    failures: tuple[type[Exception], ...] = (*_exceptions_of(module), OSError, AttributeError)
    try:
        value = read(module, name)
    except failures as error:
        return "", type(error).__name__
    return (value, "") if isinstance(value, str) and value else ("", "empty")


def _exceptions_of(module: ModuleType) -> tuple[type[Exception], ...]:
    return tuple(
        item for item in vars(module).values() if isinstance(item, type) and issubclass(item, Exception)
    )
