"""``python -m efficio`` is the command ``efficio``."""

import sys

from ._command import main

sys.exit(main())
