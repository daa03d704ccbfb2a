"""Child: a question that is answered in a forked process, which takes its side effects along when it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_PATIENCE_SECONDS = 10.0


def ask_child(question: Callable[[], Any], *, seconds: float) -> Any:
    """Run a function in a forked process and return what it returned.

    The child is what a worker would be. It takes its own copy of everything along, so that neither the random generators, nor
    files that a dataset opens when it is first read, nor a sampler's place change in this process. What is done outside the
    process (prints, counts in a file, a download) does happen.

    Args:
        question: Takes nothing; its answer must be picklable.
        seconds: Time that it may take; it gets ten seconds more before it is ended.

    Raises:
        RuntimeError: It raised, ended without an answer, or took too long; the message says which.
    """
    import multiprocessing

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(question, sender), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at each fork; the DataLoader's own workers are forked alike.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        if not receiver.poll(seconds + _PATIENCE_SECONDS):
            raise RuntimeError(f"a forked process made no sample within {seconds + _PATIENCE_SECONDS:.1f} s")
        answer, trouble = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(
            f"a forked process ended with exit code {child.exitcode} when it made a sample"
        ) from None
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
    if trouble:
        raise RuntimeError(trouble)
    return answer


def _answer(question: Callable[[], Any], sender: Any) -> None:
    import signal

    # Ctrl-C goes to the whole group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # as in a worker: the threads of OpenMP do not outlive a fork
    answer, trouble = None, ""
    try:
        answer = question()
    except Exception as error:  # noqa: BLE001  handed to the parent
        first_line = (str(error).strip() or "no message").splitlines()[0]
        trouble = f"a sample failed in a forked process ({type(error).__name__}: {first_line})"
    sender.send((answer, trouble))
