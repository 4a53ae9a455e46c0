"""`kvkeep serve`: an engine over HTTP. Needs `pip install kvkeep[server]`."""
