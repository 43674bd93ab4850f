"""`python -m draftwire`: the same as the command `draftwire`."""

from draftwire.cli.main import main
from draftwire.processes import watch_parent

if __name__ == "__main__":
    watch_parent()
    main(prog_name="draftwire")
