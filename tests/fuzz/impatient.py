"""`draftwire` that soon reconnects to expelled and refused drafters, so that one run has many wrong answers."""

import multiprocessing

from draftwire.server.parent_watch import watch_parent
from draftwire_cli.main import main

if multiprocessing.current_process().name != "grammar-trial":  # a trial process starts often and needs no torch
    from verifier_service.drafters import connection as drafter_link

    drafter_link.REFUSED_RETRY_S = 0.05
    drafter_link.BACKOFF_S = drafter_link.EXPELLED_RETRY_S = (0.05, 0.1)

if __name__ == "__main__":
    watch_parent()
    main()
