"""Replace this process by a command that is killed when its parent ends.

usage: with_parent.py PARENT_PID COMMAND...   (Linux; plain Python, run by path)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the parent ended before the signal was set
        sys.exit("the starting process has ended")
    os.execv(sys.argv[2], sys.argv[2:])
