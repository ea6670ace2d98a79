"""``python -m openmsa`` is the ``openmsa`` command."""

from openmsa.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
