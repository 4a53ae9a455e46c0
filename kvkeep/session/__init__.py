"""A model's live memory: fed, asked for tokens, edited, forked and saved."""
