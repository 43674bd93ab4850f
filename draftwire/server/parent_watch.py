"""End a service process when the process that started it has ended."""

from __future__ import annotations

import os
import signal
import threading
import time

# If this variable is set, `python -m draftwire_cli` ends when its standard input closes. The kernel closes that pipe
# however the parent ends.
PARENT_PIPE = "DRAFTWIRE_PARENT_PIPE"
STOP_TIMEOUT_S = 10.0  # seconds of an orderly stop


def watch_parent() -> None:
    """End this process after its parent, if the parent has set PARENT_PIPE."""
    if os.environ.pop(PARENT_PIPE, None) is None:
        return

    def wait() -> None:
        # Not sys.stdin: a thread that holds its lock breaks the interpreter's shutdown.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_TIMEOUT_S)
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
