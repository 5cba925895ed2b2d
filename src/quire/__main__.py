"""`python -m quire` is `quire`, but for an interrupt while PyTorch is imported: Python has no hook before that."""

import sys

from quire.cli import main

sys.exit(main())
