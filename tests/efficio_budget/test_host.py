import pytest

from efficio_budget import host, session_limit


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "kaggle"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "r1", "COLAB_GPU": "1"}, "kaggle"),
        ({"KAGGLE_USER_SECRETS_TOKEN": "x"}, "kaggle"),
        ({"KAGGLE_DATA_PROXY_TOKEN": "x"}, "kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab_20260901"}, "colab"),
        ({"COLAB_GPU": "1"}, "colab"),
        ({"TBE_RUNTIME_ADDR": "172.28.0.1:8011"}, "colab"),
        ({"COLAB_RELEASE_TAG": "r1", "KAGGLE_USERNAME": "me", "KAGGLE_KEY": "k"}, "colab"),
        ({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "k"}, "local"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "", "COLAB_RELEASE_TAG": ""}, "local"),
        ({"HOME": "/root"}, "local"),
        ({}, "local"),
    ],
    ids=lambda value: "-".join(value) or "empty" if isinstance(value, dict) else None,
)
def test_the_platform_is_read_from_the_variables_with_kaggle_first(environ, name):
    assert host(environ) == name


@pytest.mark.parametrize(("name", "seconds"), [("colab", 43200.0), ("kaggle", 43200.0), ("local", None)])
def test_a_session_lasts_twelve_hours_on_the_platforms_and_no_end_at_home(name, seconds):
    assert session_limit(name) == seconds


def test_an_unknown_platform_is_refused_naming_the_known_ones():
    with pytest.raises(ValueError, match="host='sagemaker' is not known; give 'colab', 'kaggle' or 'local'"):
        session_limit("sagemaker")
