"""Arguments that are one of a few words: for type checkers, and for options of commands."""

from typing import Literal

PolicyName = Literal["sliding", "shift", "archive", "self_extend", "full"]
DtypeName = Literal["bfloat16", "float32"]
WeightFormat = Literal["bf16", "int8", "int4"]  # the argument `weights`
BitsName = Literal["8", "8/4", "4"]  # of keys and values; "8/4": keys 8, values 4
# For prompts longer than the context: an error, or the policy evicts their beginning.
ContextPolicy = Literal["refuse", "slide"]
KvBits = BitsName | Literal[8, 4]  # as Python callers may give it

# How a prompt that differs from a session's text reuses its cells: the common beginning alone, or
# what follows as well, by edits in place.
AlignmentMode = Literal["exact", "in_place"]
