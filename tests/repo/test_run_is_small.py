"""`Run` composes the packages: what it knows is which call follows which, and that fits on a few pages."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FEWER_THAN = 250
BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source):
    """How many lines hold code: no docstrings, comments or blank lines."""
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))
            and ast.get_docstring(node) is not None
        ):
            documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def test_lines_are_counted_without_docstrings_comments_and_blanks():
    assert (
        code_lines(
            '"""Doc."""\n\n# a comment\nx = [\n    1,\n]\n\n\ndef f():\n    """Doc\n    of f."""\n    return x\n'
        )
        == 5
    )


def test_the_module_of_run_has_fewer_than_250_lines_of_code():
    source = (ROOT / "packages/efficio/src/efficio/_run.py").read_text(encoding="utf-8")
    assert code_lines(source) < FEWER_THAN
