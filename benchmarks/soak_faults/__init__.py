"""Simulated users of a server that is killed, stopped, and robbed of its disk and its clock."""
