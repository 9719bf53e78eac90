"""What the server of ranks imports before it forks them.

Where the stand-ins refuse (a machine with CUDA), the server stays up: each rank then imports them
itself, and its error, which says what to set, reaches the user.
"""

import contextlib

with contextlib.suppress(RuntimeError):
    import app.local.cpu_megatron
    import app.local.paired_windows
    import app.local.train  # noqa: F401
