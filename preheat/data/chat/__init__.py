"""Conversations and the templates that turn them into text."""
