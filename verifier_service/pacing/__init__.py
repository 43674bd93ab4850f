"""How many drafts a drafter is asked for and how long they are waited for, by measured throughput."""

from verifier_service.pacing.backlog import Backlog
from verifier_service.pacing.pace import Message, Pace
from verifier_service.pacing.policy import DraftCountPolicy, StepCount
from verifier_service.pacing.throughput import Acceptance, Arm, Profile

__all__ = ["Acceptance", "Arm", "Backlog", "DraftCountPolicy", "Message", "Pace", "Profile", "StepCount"]
