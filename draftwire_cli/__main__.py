"""`python -m draftwire_cli` runs the command `draftwire`."""

import faulthandler

from draftwire.server.parent_watch import watch_parent
from draftwire_cli.main import main

if __name__ == "__main__":
    faulthandler.enable()  # a crash in a library prints the Python stack
    watch_parent()
    main(prog_name="draftwire")
