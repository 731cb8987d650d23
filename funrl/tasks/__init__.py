"""Tasks that need no files: their data, rewards, models and warm starts."""
