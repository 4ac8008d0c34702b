"""Subprocesses that die, hang, leak or print without end."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import pytest

from retrograd.core import subprocesses
from retrograd.core.subprocesses import Child, Messages

FOREVER = "import threading; threading.Event().wait()"
TALK = "import sys; from retrograd.core.subprocesses import Messages; m = Messages(sys.argv[1]); "


def python(code: str, *arguments: object, **options: object) -> Child:
    return Child([sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)], **options)  # type: ignore[arg-type]


@pytest.fixture
def messages(tmp_path: Path) -> Path:
    (tmp_path / "messages").touch()
    return tmp_path / "messages"


@pytest.mark.parametrize(
    ("code", "ended", "output"),
    [
        ("print('fine')", "exit code 0", "fine"),
        ("raise SystemExit(3)", "exit code 3", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", ""),
        ("import os; print(os.environ['COLOUR'], flush=True); os.abort()", "killed by SIGABRT", "Fatal Python error"),
    ],
)
def test_how_it_ended_and_what_it_printed(code, ended, output):
    with python(code, changes={"COLOUR": "red"}) as child:
        assert child.wait(60) == ended
    assert child.output().startswith(output)


def test_a_process_that_does_not_end_is_ended_with_what_it_started(messages):
    heard: list[list[int]] = []
    code = (
        TALK + f"import subprocess; p = subprocess.Popen([sys.executable, '-c', '{FOREVER}']); m.send(p.pid); p.wait()"
    )
    with python(code, messages) as child:
        assert child.follow(messages, lambda words: not heard.append(words), lambda: 60) == "end"
        assert child.wait(0) is None
        assert _runs(heard[0][0])
    assert child.process.returncode < 0
    # The signal is on its way when the block is left; a zombie waits for whoever collects it.
    while _runs(heard[0][0]):
        pass


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_error_in_the_block_ends_it_too():
    with pytest.raises(ValueError, match="ours"), python(FOREVER) as child:
        raise ValueError("ours")
    assert child.process.returncode < 0


def test_of_endless_output_the_end_is_kept():
    with python("for k in range(200_000): print(f'line {k}')") as child:
        assert child.wait(60) == "exit code 0"
    assert child.output().endswith("line 199999")
    assert len(child._output) == subprocesses._KEPT


def test_messages_arrive_with_numbers_that_json_lacks(messages):
    heard: list[list[object]] = []
    code = TALK + "m.send('a', 1, (2, float('nan'))); m.send('end'); " + FOREVER
    with python(code, messages) as child:
        ended = child.follow(messages, lambda words: heard.append(words) or words[0] == "end", lambda: 60)
    assert ended == "end"
    assert heard == [["a", 1, [2, "nan"]], ["end"]]


def test_what_was_said_before_a_death_is_heard(messages):
    heard: list[list[object]] = []
    code = TALK + "m.send('a'); import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with python(code, messages) as child:
        assert child.follow(messages, lambda words: bool(heard.append(words)), lambda: 60) == "killed by SIGSEGV"
    assert heard == [["a"]]


@pytest.mark.parametrize("dump", [False, True])
def test_silence_is_a_hang_and_says_where_if_it_is_asked(messages, dump):
    heard: list[list[object]] = []
    code = TALK + f"\ndef stuck():\n    m.send('now')\n    {FOREVER}\n\nstuck()"
    with python(code, messages, dump=dump) as child:
        # All the time to begin, and then none.
        ended = child.follow(messages, lambda words: bool(heard.append(words)), lambda: 0 if heard else math.inf)
    assert ended == "hung"
    assert ("in stuck" in child.output()) is dump


def test_the_thread_that_died_is_shown_before_others():
    code = "import os, threading, time\n"
    code += "for _ in range(8):\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    code += "\ndef fall():\n    os.abort()\n\nfall()"
    with python(code) as child:
        assert child.wait(60) == "killed by SIGABRT"
    assert "in fall" in child.output()


def test_more_memory_than_it_may_hold(messages):
    with python(f"held = bytearray(200_000_000); {FOREVER}") as child:
        assert child.follow(messages, lambda words: False, lambda: 60, memory=150_000_000) == "memory"
    with python(TALK + "m.send('end')", messages) as child:
        assert child.follow(messages, lambda words: True, lambda: 60, memory=10**12) == "end"
    assert subprocesses.available() > 0


def test_it_is_left_where_somebody_wants_to_stop(messages):
    with python(FOREVER) as child:
        assert child.follow(messages, lambda words: False, lambda: 60, stop=lambda: True) == "stopped"
    assert child.process.returncode < 0


def test_half_a_line_waits_for_its_other_half(tmp_path):
    Messages(tmp_path / "m").send("whole")
    text = (tmp_path / "m").read_text()
    file = io.StringIO(text + '["ha')
    assert list(subprocesses._complete_lines(file)) == [["whole"]]
    place = file.tell()
    file.write('["half"]\n')
    file.seek(place)
    assert list(subprocesses._complete_lines(file)) == [["half"]]
