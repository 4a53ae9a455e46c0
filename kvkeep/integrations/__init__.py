"""kvkeep inside other libraries: one subpackage per library, imported only on request."""
