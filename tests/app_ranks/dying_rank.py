"""A planner call that ends its own rank by SIGKILL around the commit of one window."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from planner.policy import place

KILLED_WINDOW = 2


def die(*unused) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class PlaceThenDie:
    """Place as usual; at window 2 arrange for death `before`, `in` or `after` its commit."""

    when: str

    def __call__(self, window, *arguments):
        if window.window_id == KILLED_WINDOW:
            from train_hooks.commit import Committer
            from train_hooks.transport import Carrier

            if self.when == "before":
                die()
            if self.when == "in":
                Carrier.finish = die
            if self.when == "after":
                commit = Committer.commit

                def commit_and_die(self, *plan, **named):
                    assert commit(self, *plan, **named).num_moved > 0
                    die()

                Committer.commit = commit_and_die
        return place(window, *arguments)
