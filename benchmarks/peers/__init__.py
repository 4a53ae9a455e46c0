"""What kvkeep is compared with, each behind the same few calls, in a process of its own."""
