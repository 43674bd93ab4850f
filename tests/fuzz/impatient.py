"""`draftwire` that tries a drafter which it has expelled again at once, so that one run sees many wrong answers."""

from draftwire.server.parent_watch import watch_parent
from draftwire_cli.main import main
from verifier_service.drafters import connection as drafter_link

drafter_link.REFUSED_RETRY_S = 0.05
drafter_link.BACKOFF_S = drafter_link.EXPELLED_RETRY_S = (0.05, 0.1)

if __name__ == "__main__":
    watch_parent()
    main()
