"""`draftwire` that tries a drafter which it has expelled again at once, so that one run sees many wrong answers."""

from draftwire.cli.main import main
from draftwire.processes import watch_parent
from verifier_service import drafter_link

drafter_link.REFUSED_RETRY_S = 0.05
drafter_link.BACKOFF_S = drafter_link.EXPELLED_RETRY_S = (0.05, 0.1)

if __name__ == "__main__":
    watch_parent()
    main()
