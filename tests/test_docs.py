"""The examples in the README and in the public docstrings do what they show."""

import contextlib
import doctest
import io
import pathlib
import re

import pytest

import jaxsched

README = pathlib.Path(__file__).parent.parent / "README.md"
PUBLIC = [name for name in vars(jaxsched) if not name.startswith("_")]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.M | re.S)


def test_the_first_example_of_the_readme():
    source = blocks("python")[0].replace("10_000", "100")
    shown = README.read_text().split(blocks("python")[0])[1].split("```")[2].strip()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {})
    assert printed.getvalue().strip() == shown


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples(name):
    thing = getattr(jaxsched, name)
    tests = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    examples = [test for test in tests if test.examples]
    assert examples or isinstance(thing, type), f"{name} has no example"
    for test in examples:
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
