"""`python -m asyncspec`: the command line."""

import sys

from asyncspec.cli import main

sys.exit(main())
