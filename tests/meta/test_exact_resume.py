"""The one promise: a run that was stopped and resumed, any number of times, is the run that was never stopped.

Each session is a process of its own. What is compared is all that a run is: every bit of the model, the optimizer, the scheduler
and the average, the number of steps, the global generators, and the samples whose effect survived, in their order.
"""

import dataclasses
import json

import pytest
from training import BATCH, EPOCHS, SAMPLES, Case, End, surviving

BATCHES = -(-SAMPLES // BATCH)

CASES = {
    "gpu-loader": Case(),
    "shuffled": Case(data="loader"),
    "unshuffled": Case(data="loader", shuffle=False),
    "augmented": Case(data="loader", augment=True),
    "augmented-2-workers": Case(data="loader", augment=True, workers=2),
    "weighted": Case(data="loader", augment=True, weighted=True),
    "accumulated": Case(accumulated=3),
    "average": Case(ema=True),
    "epoch-scheduler": Case(interval="epoch"),
    "everything": Case(
        data="loader", augment=True, weighted=True, accumulated=3, ema=True, interval="epoch", evaluate=True
    ),
}

# How a session ends, what it must look like from outside, and whether everything that was trained is kept.
KINDS = {
    "sigterm": ("stopped", True),
    "group-sigterm": ("stopped", True),
    "budget": ("stopped", True),
    "sigint": ("KeyboardInterrupt", True),
    "raise-early": ("PlannedError", True),
    "raise": ("PlannedError", False),
    "raise-late": ("PlannedError", False),
    "break": ("left", False),
    "sigkill": ("killed", False),
    "sigkill-late": ("killed", False),
}


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    """What the uninterrupted run of a case ends with; each is run once."""
    known = {}

    def of(case):
        case = dataclasses.replace(case, workers=0)
        if case not in known:
            folder = tmp_path_factory.mktemp("whole")
            _, result = nursery.run(case, End(), storage=folder / "run", notes=folder / "notes")
            assert result["finished"]
            assert not result["stopped"]
            known[case] = result["state"], surviving(folder / "notes")
        return known[case]

    return of


@pytest.fixture
def sessions(nursery, quick_path):
    """Runs sessions of one run, one after the other."""

    def session(case, kind="finish", body=0, **options):
        return nursery.run(
            case, End(kind, body), storage=quick_path / "run", notes=quick_path / "notes", **options
        )

    session.notes = quick_path / "notes"
    return session


def bodies(notes):
    return sum("step" in json.loads(line) for line in notes.read_text().splitlines())


def ended_as(code, result):
    if code:
        return "killed"
    return result["caught"] or ("stopped" if result["stopped"] else "left")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("everything", kind) for kind in KINDS],
        *[("augmented-2-workers", kind) for kind in ("group-sigterm", "sigint", "raise", "sigkill")],
    ],
)
def test_a_run_that_ends_in_mid_epoch_in_any_way_goes_on_as_if_it_had_not(name, kind, sessions, whole):
    case, (ending, keeps_all) = CASES[name], KINDS[kind]
    # The first body of a group, the only one at which an exception finds nothing half-way.
    body = BATCHES + 9
    assert ended_as(*sessions(case, kind, body)) == ending

    _, result = sessions(case)

    assert 0 < result["first"] <= body + 1
    assert result["finished"]
    assert (result["state"], surviving(sessions.notes)) == whole(case)
    seen_again = bodies(sessions.notes) - EPOCHS * BATCHES
    assert seen_again == 0 if keeps_all else seen_again > 0


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_ends_again_and_again_is_the_run_that_was_never_stopped(name, sessions, whole):
    case = CASES[name]
    for number, (kind, (ending, _)) in enumerate(KINDS.items()):
        assert ended_as(*sessions(case, kind, 2 + 3 * (number % 4))) == ending, kind

    _, result = sessions(case)

    assert result["finished"]
    assert (result["state"], surviving(sessions.notes)) == whole(case)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("kind", ["sigterm", "sigkill"])
def test_another_number_of_workers_after_a_resume_is_still_the_same_run(first, second, kind, sessions, whole):
    case = Case(data="loader", augment=True)
    sessions(dataclasses.replace(case, workers=first), kind, BATCHES + 9)

    _, result = sessions(dataclasses.replace(case, workers=second))

    assert 0 < result["first"] < EPOCHS * BATCHES
    assert (result["state"], surviving(sessions.notes)) == whole(case)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("epoch-scheduler", kind) for kind in ("sigterm", "budget", "sigint", "sigkill-late")],
        *[("accumulated", kind) for kind in ("sigterm", "sigkill-late")],
    ],
)
@pytest.mark.parametrize("epoch", [1, EPOCHS], ids=["first", "last"])
def test_an_end_after_the_last_batch_of_an_epoch_neither_repeats_nor_skips_it(
    name, kind, epoch, sessions, whole
):
    case = CASES[name]
    assert ended_as(*sessions(case, kind, epoch * BATCHES - 1)) == KINDS[kind][0]

    _, result = sessions(case)

    assert result["finished"]
    assert (result["state"], surviving(sessions.notes)) == whole(case)
    if KINDS[kind][1]:
        assert bodies(sessions.notes) == EPOCHS * BATCHES


def test_a_run_that_is_stopped_after_each_single_batch_is_the_run_that_was_never_stopped(sessions, whole):
    case = Case(ema=True, epochs=1)
    for step in range(BATCHES // 2):
        _, result = sessions(case, "sigterm", 0, save_every=1000)
        assert result["first"] == step

    _, result = sessions(case)

    assert result["finished"]
    assert (result["state"], surviving(sessions.notes)) == whole(case)


def test_a_run_that_is_killed_before_its_first_step_begins_again(sessions, whole):
    case = CASES["augmented"]
    assert sessions(case, "sigkill", 0)[0] != 0

    _, result = sessions(case)

    assert result["first"] == 0
    assert (result["state"], surviving(sessions.notes)) == whole(case)


def test_the_proof_itself_tells_runs_apart(sessions, whole):
    """Two cases that differ in what is random only must not look the same, or the comparisons above would prove nothing."""
    states = [
        whole(CASES[name])[0] for name in ("gpu-loader", "shuffled", "unshuffled", "augmented", "weighted")
    ]
    assert len({state["model"] for state in states}) == len(states)
    orders = [json.dumps(whole(CASES[name])[1]) for name in ("shuffled", "unshuffled", "weighted")]
    assert len(set(orders)) == 3
    order = whole(CASES["shuffled"])[1]
    for epoch in range(EPOCHS):
        batches = order[epoch * BATCHES : (epoch + 1) * BATCHES]
        assert sorted(index for batch in batches for index in batch) == list(range(SAMPLES))
    assert order[:BATCHES] != order[BATCHES : 2 * BATCHES] != order[2 * BATCHES :]
