"""Files of a run: its directory, metrics, samples and guards."""
