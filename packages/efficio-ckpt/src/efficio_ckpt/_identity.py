"""Who a token of the Hub belongs to, and what that allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_READ: Final = frozenset({"repo.content.read", "repo.write"})


@dataclass(frozen=True)
class Identity:
    """What the Hub says about a token.

    Args:
        name: Of its user.
        role: ``"read"``, ``"write"``, ``"fineGrained"``, or whatever else the Hub says; "" if nothing.
        orgs: Organisations of the user, with the role there.
        rights: What a fine-grained token names, a user, an organisation or a repository, with the rights there.
    """

    name: str
    role: str
    orgs: Mapping[str, str]
    rights: Mapping[str, frozenset[str]]


def identity_of(answer: Mapping[str, Any]) -> Identity:
    """Read the answer to "who am I"; what is missing or of another form counts as not said.

    Args:
        answer: As the Hub gives it.

    Example:
        >>> identity_of({"name": "me", "auth": {"accessToken": {"role": "read"}}}).role
        'read'
    """
    token = _mapping(_mapping(answer.get("auth")).get("accessToken"))
    rights: dict[str, frozenset[str]] = {}
    for scope in _list(_mapping(token.get("fineGrained")).get("scoped")):
        entity = str(_mapping(_mapping(scope).get("entity")).get("name"))
        given = map(str, _list(_mapping(scope).get("permissions")))
        rights[entity] = rights.get(entity, frozenset()) | frozenset(given)
    orgs = {
        str(_mapping(org).get("name")): str(_mapping(org).get("roleInOrg"))
        for org in _list(answer.get("orgs"))
    }
    return Identity(str(answer.get("name")), str(token.get("role") or ""), orgs, rights)


def may_write(identity: Identity, repo: str) -> bool | None:
    """Tell whether a token can write to a repository; None if what is known does not say.

    Args:
        identity: Of the token.
        repo: ``"user/name"``.

    Example:
        >>> may_write(Identity("me", "read", {}, {}), "me/run"), may_write(Identity("me", "", {}, {}), "me/run")
        (False, None)
    """
    owner = repo.partition("/")[0]
    if identity.role == "read":
        return False
    if identity.role == "write" and (
        owner == identity.name or identity.orgs.get(owner) in {"admin", "write"}
    ):
        return True
    if any("repo.write" in identity.rights.get(entity, ()) for entity in (owner, repo)):
        return True
    return None


def sees_all_of(identity: Identity, owner: str) -> bool:
    """Tell whether what the Hub does not show to a token does not exist, rather than being hidden from it.

    Members of an organisation, unless they are its admins, may have repositories hidden from them.

    Args:
        identity: Of the token.
        owner: A user or an organisation.

    Example:
        >>> sees_all_of(Identity("me", "write", {}, {}), "me"), sees_all_of(Identity("me", "write", {}, {}), "you")
        (True, False)
    """
    if identity.role in {"read", "write"}:
        return owner == identity.name or identity.orgs.get(owner) == "admin"
    return owner == identity.name and bool(_READ & identity.rights.get(owner, frozenset()))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
