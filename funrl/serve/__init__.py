"""An HTTP server in front of an engine that records what a program asks: agents train without a change."""
