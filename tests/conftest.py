"""Whoever starts the tests may have told them to ignore signals (`nohup`, a shell's `&`); their programs would inherit that."""

from __future__ import annotations

import signal

for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
