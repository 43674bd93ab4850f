"""Draft heads, loaded from their published layouts."""

from drafter_service.heads.chain import ChainHead
from drafter_service.heads.loading import load_head
from drafter_service.heads.spec import Head, HeadSpec

__all__ = ["ChainHead", "Head", "HeadSpec", "load_head"]
