"""The ``openmsa`` command: one module a subcommand, and the small modules they share."""
