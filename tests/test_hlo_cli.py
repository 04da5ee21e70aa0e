"""`python -m jaxsched hlo FILE...`: what it prints, for whom, and how it refuses."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxsched._hlo import _cli
from jaxsched._hlo._cli import main

FIXTURES = Path(__file__).parent / "fixtures" / "hlo"
SEED = FIXTURES / "read_then_write-0.12.0.1.txt"
LOOP = FIXTURES / "loop-0.4.37.txt"
TEXTS = sorted(FIXTURES.glob("*.txt"))


def run(*arguments, stdin: str | bytes = ""):
    """The command in a process of its own: exit code, output, errors."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    command = [sys.executable, "-m", "jaxsched", "hlo", *map(str, arguments)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, input=data, capture_output=True, cwd=root, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_report_of_one_program(capsys):
    assert main([str(SEED), "--min-bytes", "4K"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("jit_read_then_write in ")
    assert out.endswith("\n  0 control edges\n\n")
    words = " ".join(out.split())
    assert "2 copies of at least 4,096 bytes, 32,768 bytes together" in words
    for name in ("copy", "copy.1"):
        assert (
            "16,384 bytes, not in a loop, at user.py:13 in read_then_write"
            f" {name}: f32[64,64] in main.2, made for add_dynamic-update-slice_fusion"
            " because slice_bitcast_fusion may still read the old contents when the write happens,"
            " at user.py:12 in read_then_write"
        ) in words


def test_a_loop_is_told_with_its_trip_count(capsys):
    assert main([str(LOOP)]) == 0
    out = capsys.readouterr().out
    assert "16,384 bytes, in a loop, 50 times: 819,200 bytes, at user.py:20" in out


def test_the_largest_copy_comes_first(capsys):
    assert main([str(FIXTURES / "train_step-0.12.0.1.txt"), "--json", "--min-bytes", "0"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    sizes = [copy["bytes"] for copy in report["copies"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len({*sizes}) > 1
    assert report["copied_bytes"] == sum(sizes)


def test_control_edges_are_listed(tmp_path, capsys):
    text = SEED.read_text()
    write = "calls=%fused_computation.1, "
    edge = "control-predecessors={%slice_bitcast_fusion}, "
    assert text.count(write) == 1
    path = tmp_path / "edge.txt"
    path.write_text(text.replace(write, write + edge))
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "1 control edge\n" in out
    assert "slice_bitcast_fusion before add_dynamic-update-slice_fusion, in main.2" in out
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["control_edges"] == [
        {
            "computation": "main.2",
            "before": "slice_bitcast_fusion",
            "after": "add_dynamic-update-slice_fusion",
        }
    ]


def test_json_says_what_the_text_says(capsys):
    assert main([str(LOOP), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["module"], report["min_bytes"]) == ("jit_loop", 1024)
    for copy in report["copies"]:
        assert (copy["in_loop"], copy["trip_count"]) == (True, 50)
        assert copy["total_bytes"] == 50 * copy["bytes"] == 50 * 64 * 64 * 4
        assert copy["arrays"] == [["f32", [64, 64]]]
        assert copy["cause"] == "READER_AFTER_WRITE"
        assert copy["source"] == {"file": "user.py", "line": 20, "function": None}
        assert copy["forced_by"]["name"] == "bitcast_add_fusion"
        assert copy["forced_by"]["source"]["file"] == "user.py"
        assert copy["forced_at"] == {"file": "user.py", "line": 19, "function": None}
        assert [reader["name"] for reader in copy["later_readers"]] == ["bitcast_add_fusion"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_no_line_is_wider_than_a_hundred_columns(path, capsys):
    assert main([str(path), "--min-bytes", "0"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("17", 17), ("1K", 1024), ("4M", 4 << 20), ("2g", 2 << 30), ("3KiB", 3072)],
)
def test_sizes(text, size, capsys):
    assert main([str(SEED), "--min-bytes", text]) == 0
    assert f"of at least {size:,} bytes" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "1T", "many"])
def test_sizes_that_are_none(text, capsys):
    with pytest.raises(SystemExit) as caught:
        main([str(SEED), f"--min-bytes={text}"])
    assert caught.value.code == 2
    assert "is no size; legal are 0, 512, 1K, 4M, 2G" in capsys.readouterr().err


def refused(capsys, *paths):
    """The three parts of the one error that reading these paths gives."""
    assert main([str(path) for path in paths]) == 2
    what, where, legal = capsys.readouterr().err.splitlines()
    assert what.startswith("error: ")
    assert where.startswith("  where: ")
    assert legal.startswith("  legal: ")
    return what, where


def test_a_file_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "missing.txt"
    what, where = refused(capsys, path)
    assert what == "error: the input cannot be read: No such file or directory"
    assert where == f"  where: {path}"


def test_a_folder(tmp_path, capsys):
    what, _ = refused(capsys, tmp_path)
    assert what == "error: the input cannot be read: Is a directory"


def test_a_binary_file(capsys):
    what, where = refused(capsys, sys.executable)
    assert what == "error: binary data, not HLO text"
    assert where == f"  where: {sys.executable}, line 1"


def test_a_file_of_something_else(capsys):
    what, where = refused(capsys, __file__)
    assert "not HLO text: it begins with" in what
    assert where.endswith("test_hlo_cli.py, line 1")


def test_a_file_that_is_cut_off(tmp_path, capsys):
    text = SEED.read_text()
    path = tmp_path / "cut.txt"
    path.write_text(text[: text.index("%add_dynamic-update-slice_fusion") + 40])
    what, where = refused(capsys, path)
    assert "cut off" in what
    assert where == f"  where: {path}, line {path.read_text().count(chr(10)) + 1}"


@pytest.mark.parametrize("path", [SEED, LOOP], ids=lambda path: path.stem)
def test_a_file_that_lost_a_line_is_read_or_refused(path, tmp_path, capsys):
    lines = path.read_text().splitlines(keepends=True)
    holed = tmp_path / "holed.txt"
    codes = set()
    for number in range(len(lines)):
        holed.write_text("".join(lines[:number] + lines[number + 1 :]))
        code = main([str(holed)])
        out, err = capsys.readouterr()
        assert (code == 0 and out and not err) or (code == 2 and err.startswith("error: "))
        codes.add(code)
    assert codes == {0, 2}


def test_a_file_with_a_damaged_number(tmp_path, capsys):
    path = tmp_path / "damaged.txt"
    path.write_text(SEED.read_text().replace("%copy = f32[64,64]", "%copy = f32[64,b4]"))
    what, where = refused(capsys, path)
    assert what.startswith("error: the text contradicts itself: ")
    assert where == f"  where: {path}"


def test_a_file_whose_instructions_run_in_a_circle(tmp_path, capsys):
    path = tmp_path / "circle.txt"
    path.write_text(SEED.read_text().replace("copy(%x.1)", "copy(%copy)"))
    what, _ = refused(capsys, path)
    assert "the operands of copy" in what
    assert "lead back to it in computation main.2" in what


def test_one_bad_file_does_not_hide_the_others(tmp_path, capsys):
    assert main([str(tmp_path / "missing.txt"), str(SEED)]) == 2
    out, err = capsys.readouterr()
    assert "jit_read_then_write" in out
    assert "missing.txt" in err


def test_standard_input():
    code, out, err = run("-", stdin=SEED.read_text() + "\n\n" + LOOP.read_text())
    assert (code, err) == (0, "")
    assert "jit_read_then_write in standard input\n" in out
    assert "jit_loop in standard input\n" in out


def test_standard_input_that_is_binary():
    code, out, err = run("-", stdin=b"\xff\xfe\0\0" * 100)
    assert (code, out) == (2, "")
    assert err.splitlines()[:2] == [
        "error: binary data, not HLO text",
        "  where: standard input, line 1",
    ]


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "jaxsched", "hlo", *map(str, TEXTS * 9), "--min-bytes", "0"]
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


class Terminal:
    """A standard error that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_only_after_a_second_and_only_on_a_terminal(monkeypatch, capsys):
    now = time.monotonic()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(_cli.time, "monotonic", lambda: now)
    assert main([str(SEED)]) == 0
    assert terminal.text == ""
    clock = iter(range(1000))
    monkeypatch.setattr(_cli.time, "monotonic", lambda: now + 2 * next(clock))
    assert main([str(SEED)]) == 0
    assert f"{SEED}: 0 MB read"[:99] in terminal.text
    assert terminal.text.endswith("\r\x1b[K")
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    terminal.text = ""
    assert main([str(SEED)]) == 0
    assert terminal.text == ""
    assert "jit_read_then_write" in capsys.readouterr().out
