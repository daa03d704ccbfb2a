import sys

from efficio._console import Notes, progress_bar, say


def test_a_line_is_written_at_once(capsys):
    say("here")
    assert capsys.readouterr().out == "here\n"


def test_each_note_is_told_once_and_kept_in_order(capsys):
    notes = Notes()
    notes.tell("one", None, "two")
    notes.tell("one", "")
    assert notes.told == ["one", "two"]
    assert capsys.readouterr().out == "efficio: one\nefficio: two\n"


def test_an_optimisation_is_noted_once_and_not_shown(capsys):
    notes = Notes()
    notes.use("workers", "", "workers")
    notes.use("workers")
    assert notes.applied == ["workers"]
    assert capsys.readouterr().out == ""


def test_two_runs_share_no_notes():
    one, two = Notes(), Notes()
    one.use("workers")
    assert two.applied == []


def updates(bar, count):
    with bar:
        for _ in range(count):
            bar.update()


def test_a_bar_in_a_pipe_writes_a_line_now_and_then_only(capsys):
    updates(progress_bar(total=10_000, done=0, title="epoch 1/1", shown=True), 10_000)
    written = capsys.readouterr().err
    assert "epoch 1/1" in written
    assert "10000/10000" in written
    assert written.count("\r") + written.count("\n") <= 5


def test_a_bar_that_is_not_shown_writes_nothing(capsys):
    updates(progress_bar(total=10, done=0, title="epoch 1/1", shown=False), 10)
    assert capsys.readouterr() == ("", "")


def test_a_resumed_bar_begins_where_the_run_is(capsys):
    with progress_bar(total=10, done=4, title="epoch 1/1", shown=True) as bar:
        assert bar.n == 4
        assert bar.total == 10
    assert "4/10" in capsys.readouterr().err


def test_a_bar_without_a_length_counts(capsys):
    updates(progress_bar(total=None, done=3, title="epoch 1/1", shown=True), 2)
    assert "5batch" in capsys.readouterr().err


def test_a_line_does_not_break_a_bar(capsys):
    with progress_bar(total=10, done=0, title="epoch 1/1", shown=True):
        say("here")
    assert capsys.readouterr().out == "here\n"


def test_a_bar_that_is_not_shown_needs_no_console(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    updates(progress_bar(total=10, done=0, title="epoch 1/1", shown=False), 10)
