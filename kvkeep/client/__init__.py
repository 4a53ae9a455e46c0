"""A server's sessions from Python, over HTTP."""

from kvkeep.client.client import AsyncClient, Client
from kvkeep.client.remote import RemoteSession

__all__ = ["AsyncClient", "Client", "RemoteSession"]
