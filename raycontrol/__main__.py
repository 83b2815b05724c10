"""``python -m raycontrol`` is the ``raycontrol`` command."""

from __future__ import annotations

from raycontrol.cli import main

if __name__ == "__main__":
    main()
