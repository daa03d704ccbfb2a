import sys
from types import ModuleType

import pytest

from efficio_budget import secret

VALUE = "hf_do_not_show_me"
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "r1"}
COLAB = {"COLAB_RELEASE_TAG": "r1"}


def use_colab(monkeypatch, answer, asked):
    """Puts a module in place that behaves as the one of Colab's image."""
    userdata = ModuleType("google.colab.userdata")
    userdata.SecretNotFoundError = type("SecretNotFoundError", (Exception,), {})
    userdata.NotebookAccessError = type("NotebookAccessError", (Exception,), {})
    userdata.TimeoutException = type("TimeoutException", (Exception,), {})

    def get(key):
        asked.append(("colab", key))
        return answer(userdata)

    userdata.get = get
    for name in ("google", "google.colab"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "google.colab.userdata", userdata)


def use_kaggle(monkeypatch, answer, asked):
    """Puts a module in place that behaves as the one of Kaggle's image."""
    module = ModuleType("kaggle_secrets")
    for name in ("BackendError", "CredentialError", "ValidationError"):
        setattr(module, name, type(name, (Exception,), {}))

    class UserSecretsClient:
        def __init__(self):
            self.module = module

        def get_secret(self, label):
            asked.append(("kaggle", label))
            return answer(module)

    module.UserSecretsClient = UserSecretsClient
    monkeypatch.setitem(sys.modules, "kaggle_secrets", module)


def raising(name, *args):
    def answer(module):
        raise getattr(module, name)(*args)

    return answer


@pytest.fixture(autouse=True)
def no_platform(monkeypatch):
    for name in ("google.colab.userdata", "kaggle_secrets"):
        monkeypatch.setitem(sys.modules, name, None)


def test_the_environment_comes_first_and_nothing_else_is_asked(monkeypatch):
    asked = []
    use_colab(monkeypatch, lambda _: "other", asked)
    use_kaggle(monkeypatch, lambda _: "other", asked)
    assert secret("HF_TOKEN", environ={"HF_TOKEN": VALUE}) == VALUE
    assert secret("HF_TOKEN", environ={**KAGGLE, "HF_TOKEN": VALUE}) == VALUE
    assert asked == []


def test_the_variables_of_the_process_are_the_default(monkeypatch):
    monkeypatch.setenv("EFFICIO_TEST_SECRET", VALUE)
    assert secret("EFFICIO_TEST_SECRET") == VALUE


def test_colab_is_asked_when_the_environment_has_none(monkeypatch):
    asked = []
    use_colab(monkeypatch, lambda _: VALUE, asked)
    assert secret("HF_TOKEN", environ=COLAB) == VALUE
    assert secret("HF_TOKEN", environ={**COLAB, "HF_TOKEN": ""}) == VALUE
    assert asked == [("colab", "HF_TOKEN")] * 2


def test_on_kaggle_the_secrets_of_colab_are_not_asked(monkeypatch):
    asked = []
    use_colab(monkeypatch, lambda _: "nobody would answer", asked)
    use_kaggle(monkeypatch, lambda _: VALUE, asked)
    assert secret("HF_TOKEN", environ=KAGGLE) == VALUE
    assert asked == [("kaggle", "HF_TOKEN")]


def test_a_secret_that_is_nowhere_is_an_error_naming_where_it_was_looked_for():
    with pytest.raises(LookupError) as caught:
        secret("HF_TOKEN", environ={})
    message = str(caught.value)
    assert message.startswith("secret 'HF_TOKEN' was not found in the environment (not set), ")
    assert "Colab's secrets (not on this machine)" in message
    assert "Kaggle's secrets (not on this machine)" in message
    assert "\n" not in message


@pytest.mark.parametrize("failure", ["SecretNotFoundError", "NotebookAccessError", "TimeoutException"])
def test_a_refusal_of_colab_is_named_in_the_error(monkeypatch, failure):
    use_colab(monkeypatch, raising(failure, f"said {VALUE}"), [])
    with pytest.raises(LookupError, match=rf"Colab's secrets \({failure}\)") as caught:
        secret("HF_TOKEN", environ=COLAB)
    assert VALUE not in str(caught.value)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("failure", ["BackendError", "CredentialError", "ValidationError"])
def test_a_refusal_of_kaggle_is_named_in_the_error_without_what_it_answered(monkeypatch, failure):
    use_kaggle(monkeypatch, raising(failure, f"Response: {VALUE}"), [])
    with pytest.raises(LookupError, match=rf"Kaggle's secrets \({failure}\)") as caught:
        secret("HF_TOKEN", environ=KAGGLE)
    assert VALUE not in str(caught.value)
    assert "Colab" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "error", [ConnectionError("internet is off"), TimeoutError(), AttributeError("kernel")], ids=repr
)
def test_a_client_that_cannot_reach_its_service_is_an_error_of_ours(monkeypatch, error):
    def answer(_):
        raise error

    use_colab(monkeypatch, answer, [])
    with pytest.raises(LookupError, match=type(error).__name__):
        secret("HF_TOKEN", environ=COLAB)


@pytest.mark.parametrize("value", ["", None, b"bytes"], ids=repr)
def test_an_empty_answer_is_no_secret(monkeypatch, value):
    use_colab(monkeypatch, lambda _: value, [])
    with pytest.raises(LookupError, match=r"Colab's secrets \(empty\)"):
        secret("HF_TOKEN", environ=COLAB)


@pytest.mark.parametrize("name", ["", "  ", None], ids=repr)
def test_a_secret_without_a_name_is_refused(name):
    with pytest.raises(ValueError, match="is not the name of a secret"):
        secret(name, environ={})
