"""Search rows in the background: yield the cores to state loading wherever both want them.

The search may run on any core, not only on the one its rank is pinned to, and at a lower priority
than the ranks (Linux gives every thread its own; threads that the search starts inherit both).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

NICENESS = 10
"""A tenth of a core that a thread of normal priority wants too; all of an idle one."""


def in_background(
    schedule: Callable[..., Any], cores: set[int] | None = None, niceness: int = NICENESS
) -> Callable[..., Any]:
    """`schedule` that first lowers its own thread's priority; for `PlannerCalls(schedule=...)`.

    cores: where the search may run; None is every core that the parent process may use, since
    ranks are pinned by the process that starts them. A lowered priority can not be raised again
    without privileges, so the result must be called on a thread of its own, as `Admission` does;
    raises RuntimeError on the main thread.
    """

    def search(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("in_background: called on the main thread, which would stay slow")
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
        os.sched_setaffinity(thread, cores or all_cores())
        return schedule(*arguments)

    return search


def all_cores() -> set[int]:
    """The cores that the parent process may use, or this one where that cannot be read."""
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return os.sched_getaffinity(0)
