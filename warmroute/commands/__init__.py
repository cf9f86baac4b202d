"""One module a subcommand, imported only when that subcommand is asked for."""
