"""`python -m quire` is the command `quire`. Only an interrupt while PyTorch is imported prints a traceback here."""

import sys

from quire.cli import main

sys.exit(main())
