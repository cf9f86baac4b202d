"""Starts broker, workers and router as child processes, watches them, ends them."""
