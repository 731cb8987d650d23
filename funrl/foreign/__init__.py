"""Environments that are written for other frameworks."""
