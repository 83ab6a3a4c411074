"""`python -m minidist` is `minidist`."""

import sys

from minidist.cli import main

sys.exit(main())
