"""Trainings in processes of their own, forked from one warmed process that has no threads and sees no GPU.

Importing torch takes seconds, a fork a few milliseconds: so a proof can afford hundreds of processes. As a script it is that
process; it takes requests as lines of JSON on its standard input.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

SECONDS = 120  # after which the kernel ends a training that hangs


class Nursery:
    """Starts trainings and waits for them; close it."""

    def __init__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, case, end, **files):
        """Begin a session of `training.train`, and return its process id; it leads a process group."""
        arguments = {"case": dataclasses.asdict(case), "end": dataclasses.asdict(end)}
        arguments |= {name: value if isinstance(value, int) else str(value) for name, value in files.items()}
        return self._ask(start=arguments)["pid"]

    def wait(self, pid):
        """The exit code (negative: the signal) and what `train` returned, None if it did not come to that."""
        answer = self._ask(wait=pid)
        if answer["code"] not in (0, -signal.SIGKILL):
            raise AssertionError(f"a session ended with {answer['code']}:\n{answer['result']}")
        return answer["code"], answer["result"] and json.loads(answer["result"])

    def run(self, case, end, **files):
        """Start and wait."""
        return self.wait(self.start(case, end, **files))

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the nursery ended with {self._process.wait()}")
        return json.loads(answer)


def main():
    import gc
    import tempfile

    import torch
    import training

    answers = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # where runs talk
    torch.set_num_threads(1)
    with answers, tempfile.TemporaryDirectory() as folder:
        files = {"storage": folder, "notes": f"{folder}/notes"}
        training.train(training.Case(epochs=1), training.End(), **files)
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, every page of this process
        for line in sys.stdin:
            request = json.loads(line)
            if "start" in request:
                pid = os.fork()
                if pid == 0:
                    session(request["start"], f"{folder}/result-{os.getpid()}")
                answer = {"pid": pid}
            else:
                pid = request["wait"]
                _, status = os.waitpid(pid, 0)
                result = Path(f"{folder}/result-{pid}")
                answer = {"code": os.waitstatus_to_exitcode(status), "result": None}
                if result.exists():
                    answer["result"] = result.read_text()
                    result.unlink()
            print(json.dumps(answer), file=answers, flush=True)


def session(request, result):
    """The child: never returns, and ends as an ordinary script would, workers and threads first."""
    import gc
    import multiprocessing.util
    import threading

    import training

    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(SECONDS)
        os.dup2(1, 0)
        # What a dying process and its orphaned workers say is of no interest; an error comes back as the result.
        os.dup2(1, 2)
        case, end = training.Case(**request.pop("case")), training.End(**request.pop("end"))
        outcome = json.dumps(training.train(case, end, **request))
        code = 0
    except BaseException:
        outcome = traceback.format_exc()
    try:
        gc.collect()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        multiprocessing.util._exit_function()
        with open(result, "w", encoding="utf-8") as file:
            file.write(outcome)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
