"""What ties engine processes to their worker."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from sealmesh.inference.daemon_thread import in_daemon_thread
from sealmesh.inference.last_words import LAST_WORDS_VARIABLE, StartFailures, hear, say
from sealmesh.inference.parent_watch import die_with_parent

# The child is started by a thread that ends, which is where PR_SET_PDEATHSIG would kill it too early.
PARENT = """
import multiprocessing, sys, threading, time
from sealmesh.inference.parent_watch import die_with_parent

def child(channel):
    channel.send(die_with_parent())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    starter = threading.Thread(target=process.start)
    starter.start()
    starter.join()
    assert ours.recv() is True
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_a_child_lives_with_its_parent_and_dies_with_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        with pytest.raises(psutil.TimeoutExpired):
            child.wait(0.3)
    finally:
        parent.kill()
        parent.wait()
    try:
        child.wait(5)
    except psutil.TimeoutExpired:
        child.kill()
        raise


def test_a_process_of_its_own_watches_nobody() -> None:
    assert not die_with_parent()


def test_last_words_keep_the_first_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "words"
    assert hear(path) is None
    say("INTERNAL", "nobody listens")
    monkeypatch.setenv(LAST_WORDS_VARIABLE, str(path))
    say("INTEGRITY_FAILURE", "tensor w,\nchunk 3")
    say("INTERNAL", "and then everything else broke")
    assert hear(path) == ("INTEGRITY_FAILURE", "tensor w, chunk 3")


def test_the_first_exception_that_is_logged_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAST_WORDS_VARIABLE, str(tmp_path / "words"))
    logger = logging.Logger("vllm")
    logger.addHandler(StartFailures())
    logger.error("no exception here")
    assert hear(tmp_path / "words") is None
    for message in ("\nno kernel for it\nand more", "then all the rest"):
        logger.error("failed", exc_info=RuntimeError(message))
    assert hear(tmp_path / "words") == ("ENGINE_FAILED", "no kernel for it")


def test_a_reason_that_was_said_ends_the_process_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LAST_WORDS_VARIABLE, str(tmp_path / "words"))
    logger = logging.Logger("vllm")
    logger.addHandler(logging.StreamHandler())
    logger.handlers.insert(0, StartFailures())
    say("INTEGRITY_FAILURE", "tensor w was changed")
    logger.error("a line without a traceback stays")
    with pytest.raises(SystemExit) as ended:
        logger.error("WorkerProc failed to start.", exc_info=RuntimeError("tensor w was changed"))
    assert ended.value.code == 1
    assert capsys.readouterr().err == "a line without a traceback stays\n"
    assert hear(tmp_path / "words") == ("INTEGRITY_FAILURE", "tensor w was changed")


async def test_work_in_a_daemon_thread_returns_and_raises() -> None:
    assert await in_daemon_thread(os.getpid) == os.getpid()
    assert await in_daemon_thread(lambda: threading.current_thread().daemon)
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


async def test_work_that_nobody_waits_for_any_more_is_let_go() -> None:
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(10)
        ended.set()

    task = asyncio.create_task(in_daemon_thread(work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await asyncio.to_thread(ended.wait, 10)
