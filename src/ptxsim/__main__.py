"""`python -m ptxsim`: see cli.py."""

import sys

from ptxsim.cli import main

sys.exit(main())
