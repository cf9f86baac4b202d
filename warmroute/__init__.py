"""The command line, and what ties the processes together."""
