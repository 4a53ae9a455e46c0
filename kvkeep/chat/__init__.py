"""Conversations between API and template: one normal form, its rendering, and the reading back."""
