"""kvkeep inside other libraries: one folder, one library, which it imports when it is asked for."""
