"""Under torchrun: the rank named on the command line exits 3 as soon as it runs, the others stay."""

from __future__ import annotations

import os
import signal
import sys

if os.environ["RANK"] == sys.argv[1]:
    print("rank", sys.argv[1], "has had enough", flush=True)
    sys.exit(3)
signal.pause()
