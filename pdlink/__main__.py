"""`python -m pdlink`."""

import sys

from pdlink.cli import main

sys.exit(main())
