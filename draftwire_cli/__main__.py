"""`python -m draftwire_cli`: the same as the command `draftwire`."""

import faulthandler

from draftwire.server.parent_watch import watch_parent
from draftwire_cli.main import main

if __name__ == "__main__":
    faulthandler.enable()  # a crash in a library names the Python code that led to it
    watch_parent()
    main(prog_name="draftwire")
