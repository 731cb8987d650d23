"""Records, progress and pages of a run."""
