"""One file per subcommand: its arguments, its few lines of work, its printing."""
