"""Number of drafts requested from each drafter, the wait for them, and which of them are verified."""

from verifier_service.pacing.backlog import Backlog
from verifier_service.pacing.budget import Limit, VerificationBudget, chosen
from verifier_service.pacing.calibration import Calibration
from verifier_service.pacing.pace import Message, Pace
from verifier_service.pacing.policy import DraftingPolicy, StepCount
from verifier_service.pacing.step_costs import Profile, StepCosts

__all__ = [
    "Backlog",
    "Calibration",
    "DraftingPolicy",
    "Limit",
    "Message",
    "Pace",
    "Profile",
    "StepCosts",
    "StepCount",
    "VerificationBudget",
    "chosen",
]
