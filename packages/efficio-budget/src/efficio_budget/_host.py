"""Which platform this is, and how long a session lasts there."""

from collections.abc import Mapping
from typing import Literal

Host = Literal["colab", "kaggle", "local"]

# KAGGLE_USERNAME and KAGGLE_KEY are the credentials of Kaggle's command line, set on any machine.
_KAGGLE_VARIABLES = ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_USER_SECRETS_TOKEN", "KAGGLE_DATA_PROXY_TOKEN")
_COLAB_VARIABLES = ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION", "COLAB_GPU", "TBE_RUNTIME_ADDR")
_HOURS = 3600.0


def host(environ: Mapping[str, str]) -> Host:
    """The platform that an environment belongs to.

    Kaggle is asked first: its image is built on a Colab image, and the variables of both can be set there.

    Args:
        environ: The process's variables, usually `os.environ`; an empty value counts as absent.

    Returns:
        `"local"` for everything that is neither Colab nor Kaggle.

    Examples:
        >>> host({"COLAB_RELEASE_TAG": "release-colab_20260901", "KAGGLE_KERNEL_RUN_TYPE": "Batch"})
        'kaggle'
        >>> host({"COLAB_RELEASE_TAG": "release-colab_20260901"}), host({"HOME": "/root"})
        ('colab', 'local')

    Source:
        Kaggle/docker-python, patches/kaggle_secrets.py and Dockerfile.tmpl; googlecolab/colabtools.
    """
    if any(environ.get(variable) for variable in _KAGGLE_VARIABLES):
        return "kaggle"
    if any(environ.get(variable) for variable in _COLAB_VARIABLES):
        return "colab"
    return "local"


def session_limit(host: Host) -> float | None:
    """The longest time for which a platform leaves a session running.

    It counts from the start of the session, so a cell that begins later has less. It is an upper bound:
    both platforms may end a session earlier, and both end an idle one within about an hour and a half.

    Args:
        host: As `host()` names it.

    Returns:
        Seconds, or None where nobody takes the machine away.

    Raises:
        ValueError: An unknown platform.

    Examples:
        >>> session_limit("kaggle")
        43200.0
        >>> session_limit("local") is None
        True

    Source:
        Colab: "at most 12 hours" in the free version, research.google.com/colaboratory/faq.html (subscribers may
        get up to 24). Kaggle: 12 hours for CPU and GPU sessions, 9 for TPU, kaggle.com/docs/notebooks. Both
        as known in December 2026, and both change without notice.
    """
    if host in ("colab", "kaggle"):
        return 12.0 * _HOURS
    if host == "local":
        return None
    msg = f"host={host!r} is not known; give 'colab', 'kaggle' or 'local'"
    raise ValueError(msg)
