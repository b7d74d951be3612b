"""tests/warm.py: a forked process is like one that was started."""

import os
import signal
import subprocess
import time

import pytest

from tests.conftest import REPO
from tests.warm import warm_python


def run(*arguments: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [warm_python(), *arguments], capture_output=True, text=True, timeout=60, **more
    )


def test_it_has_what_it_was_given(tmp_path):
    (tmp_path / "program.py").write_text(
        "import beside, os, sys\nprint(sys.argv, os.getcwd(), os.environ['A'], "
        "input(), beside.found, __name__)\nsys.exit(7)\n"
    )
    (tmp_path / "beside.py").write_text("found = 'yes'\n")
    done = run(
        "-u", "program.py", "--x=1", cwd=tmp_path, env={**os.environ, "A": "b"}, input="hello"
    )
    assert (
        done.stdout == f"['program.py', '--x=1'] {tmp_path} b hello yes __main__\n"
        and done.returncode == 7
    )
    assert run("-m", "beside", cwd=tmp_path).returncode == 0
    for end, code, told, error in (
        ("print('end', end='')", 0, "endlast\n", ""),
        ("sys.exit('why')", 1, "last\n", "why\n"),
    ):
        waits = "threading.Timer(0.1, lambda: atexit.register(print, 'last')).start()"
        done = run("-c", f"import atexit, sys, threading; {waits}; {end}")
        assert (done.returncode, done.stdout, done.stderr) == (code, told, error)
    # nothing of this repository
    done = run("-c", "import files", cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 1 and done.stderr.endswith(
        "ModuleNotFoundError: No module named 'files'\n"
    )
    assert (
        run(
            "-c",
            "import files, os; assert os.getcwd() == '/'",
            cwd="/",
            env={"PYTHONPATH": str(REPO)},
        ).returncode
        == 0
    )


def test_files_that_were_open_stay_open(tmp_path):
    with open(tmp_path / "out", "w") as file:
        number = file.fileno()
        assert (
            run("-c", f"import os; os.write({number}, b'here')", pass_fds=[number]).returncode == 0
        )
    assert (tmp_path / "out").read_text() == "here"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_as_it_was_ended(number):
    assert run("-c", f"import os; os.kill(os.getpid(), {int(number)})").returncode == -number


def test_signals_reach_it_and_its_death_is_certain(tmp_path):
    told = tmp_path / "told"
    code = (
        "import pathlib, signal, sys, time; said = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGUSR1, lambda *_: said.write_text('usr1'))\n"
        "said.write_text('ready')\nwhile True:\n    time.sleep(0.01)\n    said.with_suffix('.now').touch()"
    )

    def wait_for(text: str) -> None:
        while not told.exists() or told.read_text() != text:
            time.sleep(0.01)

    process = subprocess.Popen([warm_python(), "-c", code, told])
    wait_for("ready")
    process.send_signal(signal.SIGUSR1)
    wait_for("usr1")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    now, end = told.with_suffix(".now"), time.monotonic() + 30
    while now.exists() and time.monotonic() < end:
        now.unlink()
        time.sleep(0.2)
    assert not now.exists()
