"""`kvkeep chat`: a conversation without end on a fixed memory."""

from kvkeep.cli.chat.command import chat

__all__ = ["chat"]
