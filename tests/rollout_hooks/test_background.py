"""The background search: slower threads on any core, never the caller's."""

from __future__ import annotations

import os
import threading

import pytest

from rollout_hooks.background import NICENESS, in_background


def run_on_a_thread(function, *arguments):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)))
    thread.start()
    thread.join()
    return found[0]


def test_only_the_searching_thread_yields():
    def priority_and_cores(*arguments):
        thread = threading.get_native_id()
        return arguments, os.getpriority(os.PRIO_PROCESS, thread), os.sched_getaffinity(thread)

    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    core = min(os.sched_getaffinity(0))
    search = in_background(priority_and_cores, cores={core}, niceness=mine + 3)
    assert run_on_a_thread(search, "window", 4) == (("window", 4), mine + 3, {core})
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_threads_that_the_search_starts_yield_too():
    def started_inside():
        return run_on_a_thread(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    assert run_on_a_thread(in_background(started_inside)) >= NICENESS


def test_the_main_thread_is_refused():
    with pytest.raises(RuntimeError, match="main thread"):
        in_background(lambda: None)()
