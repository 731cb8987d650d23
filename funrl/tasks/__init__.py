"""Tasks that need no files: data, a reward and a model to begin with."""
