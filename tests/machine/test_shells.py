"""Sitting at a shell: keys and sizes go there, output comes back, and the terminal is as it was, however it ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from raycontrol.errors import UsageError
from raycontrol.shells import sit
from tests.terminal import Person

SEAT = """
import os, queue, sys
from raycontrol.errors import RaycontrolError
from raycontrol.shells import sit
from raycontrol.terminals import Output

class Echo:
    '''Says what it is told; e ends it with 5, b breaks the line.'''
    def __init__(self, rows, columns, term):
        self.news = queue.Queue()
        self.news.put(Output(f"begins {rows}x{columns} {term}\\r\\n".encode()))
    def read(self):
        news = self.news.get()
        if isinstance(news, Exception):
            raise news
        return news
    def write(self, data):
        if data == b"e":
            self.news.put(Output(b"bye\\r\\n", 5))
        elif data == b"b":
            self.news.put(RaycontrolError("the line is broken"))
        else:
            self.news.put(Output(f"got {data!r}\\r\\n".encode()))
    def resize(self, rows, columns):
        self.news.put(Output(f"now {rows}x{columns}\\r\\n".encode()))
    def close(self):
        os.write(1, b"closed\\n")

try:
    status = sit(Echo)
except RaycontrolError as error:
    print(error)
    status = 125
sys.exit(status)
"""


def seat(folder: Path) -> Person:
    program = folder / "seat.py"
    program.write_text(SEAT)
    return Person([sys.executable, program], env={**os.environ, "TERM": "xterm-256color"})


def test_every_key_goes_there_ctrl_c_too_and_its_status_comes_back(tmp_path: Path) -> None:
    person = seat(tmp_path)
    person.sees(r"begins 24x80 xterm-256color\r\n")
    person.type("\x03")
    person.sees(r"got b'\\x03'")
    person.type("ä")
    person.sees(r"got b'\\xc3\\xa4'")
    person.resize(50, 132)
    person.sees(r"now 50x132")
    person.type("e")
    person.sees(r"bye\r\nclosed")
    assert person.leaves() == 5


def test_a_line_that_breaks_is_told_of_on_a_terminal_that_is_sound_again(tmp_path: Path) -> None:
    person = seat(tmp_path)
    person.sees("begins")
    person.type("b")
    person.sees(r"closed\r\nthe line is broken\r\n")
    assert person.leaves() == 125


def test_a_sigterm_ends_the_shell_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    person = seat(tmp_path)
    person.sees("begins")
    children = Path(f"/proc/{person.process.pid}/task/{person.process.pid}/children").read_text().split()
    os.kill(int(children[0]) if children else person.process.pid, signal.SIGTERM)
    person.sees("closed")
    assert person.leaves() == 129


def test_without_a_terminal_there_is_none() -> None:
    try:
        sit(lambda rows, columns, term: None)  # type: ignore[arg-type,return-value]
    except UsageError as error:
        assert str(error) == "shell: needs a terminal; `raycontrol exec --job` runs commands without one"
    else:
        raise AssertionError("it sat down without a terminal")
