"""Tokenizers, control tokens and chat templates."""
