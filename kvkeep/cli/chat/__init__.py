"""`kvkeep chat`: an endless conversation in a bounded memory."""
