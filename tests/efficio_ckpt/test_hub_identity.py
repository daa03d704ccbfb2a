"""What a token may do is read from what the Hub says; what it does not say stays open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficio_ckpt._identity import identity_of, may_write, sees_all_of


def answer(role, *scopes, orgs=()):
    scoped = [{"entity": {"name": name}, "permissions": list(rights)} for name, rights in scopes]
    return {
        "name": "me",
        "orgs": [{"name": name, "roleInOrg": there} for name, there in orgs],
        "auth": {"accessToken": {"role": role, "fineGrained": {"scoped": scoped}}},
    }


@pytest.mark.parametrize(
    ("said", "repo", "write", "sees"),
    [
        (answer("write"), "me/run", True, True),
        (answer("read"), "me/run", False, True),
        (answer("write"), "you/run", None, False),
        (answer("write", orgs=[("lab", "admin")]), "lab/run", True, True),
        (answer("write", orgs=[("lab", "write")]), "lab/run", True, False),
        (answer("write", orgs=[("lab", "contributor")]), "lab/run", None, False),
        (answer("fineGrained", ("me", ["repo.write"])), "me/run", True, True),
        (answer("fineGrained", ("me", ["repo.content.read"])), "me/run", None, True),
        (answer("fineGrained", ("me/run", ["repo.write"])), "me/run", True, False),
        (answer("fineGrained", ("me/other", ["repo.write"])), "me/run", None, False),
        (answer("fineGrained", ("lab", ["repo.write"])), "lab/run", True, False),
        (answer("oauth"), "me/run", None, False),
        ({"name": "me"}, "me/run", None, False),
        ({}, "me/run", None, False),
    ],
    ids=range(14),
)
def test_rights_are_read(said, repo, write, sees):
    identity = identity_of(said)
    assert may_write(identity, repo) is write
    assert sees_all_of(identity, repo.split("/")[0]) is sees


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "name",
                    "orgs",
                    "auth",
                    "accessToken",
                    "role",
                    "fineGrained",
                    "scoped",
                    "entity",
                    "permissions",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["name", "orgs", "auth"]), json_values))
def test_an_answer_of_any_form_is_read(said):
    identity = identity_of(said)
    may_write(identity, "me/run")
    sees_all_of(identity, "me")
