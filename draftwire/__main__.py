"""`python -m draftwire`: the same as the command `draftwire`."""

import faulthandler

from draftwire.cli.main import main
from draftwire.processes import watch_parent

if __name__ == "__main__":
    faulthandler.enable()  # a crash in a library names the Python code that led to it
    watch_parent()
    main(prog_name="draftwire")
