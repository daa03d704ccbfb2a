import json

from hypothesis import given
from hypothesis import strategies as st

from efficio._progress import Progress
from efficio_data import Position

COUNTS = st.integers(0, 2**63)
LOOPS = st.dictionaries(st.text(), st.tuples(COUNTS, COUNTS, COUNTS, st.none() | COUNTS))


@given(st.integers(), COUNTS, COUNTS, st.floats(0, 1e12), LOOPS)
def test_progress_comes_back_as_it_was(seed, step, skipped, seconds, loops):
    progress = Progress(
        seed=seed,
        step=step,
        skipped=skipped,
        seconds=seconds,
        loops={name: Position(epoch, samples) for name, (epoch, samples, _, _) in loops.items()},
        batches={name: batches for name, (_, _, batches, _) in loops.items()},
        lengths={name: length for name, (_, _, _, length) in loops.items() if length is not None},
    )
    assert Progress.from_tree(json.loads(json.dumps(progress.to_tree()))) == progress


def test_the_tree_is_a_copy():
    progress = Progress(seed=0, loops={"0": Position(1, 8)})
    tree = progress.to_tree()
    progress.loops["0"] = Position(2)
    assert tree["loops"]["0"]["epoch"] == 1


def test_two_runs_share_no_progress():
    Progress(seed=0).loops["0"] = Position(1)
    assert Progress(seed=0).loops == {}
