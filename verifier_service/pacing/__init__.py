"""How fast drafters are asked and when steps run: measured costs, and what they say is fastest."""

from verifier_service.pacing.copying import CopyLimit
from verifier_service.pacing.costs import Acceptance, DrafterCost, Profile, TargetCost
from verifier_service.pacing.governor import NUM_SCOUTS, Governor
from verifier_service.pacing.grouping import Expected, Group, hold_until
from verifier_service.pacing.hindsight import Hindsight, Made, Output
from verifier_service.pacing.link import Message
from verifier_service.pacing.pace import MOST_ROWS, Pace
from verifier_service.pacing.plan import Forecast, Load, Plan

__all__ = [
    "MOST_ROWS",
    "NUM_SCOUTS",
    "Acceptance",
    "CopyLimit",
    "DrafterCost",
    "Expected",
    "Forecast",
    "Governor",
    "Group",
    "Hindsight",
    "Load",
    "Made",
    "Message",
    "Output",
    "Pace",
    "Plan",
    "Profile",
    "TargetCost",
    "hold_until",
]
